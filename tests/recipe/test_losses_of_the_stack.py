"""What `check` says of losses is what the pinned LLaMA-Factory and trl do."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("loss", ["hinge", "ipo", "kto_pair"])
def test_losses_left_to_trl_are_all_sigmoid(loss: str) -> None:
    import llamafactory.extras.packages  # noqa: F401
    import torch
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    trainer: Any = CustomDPOTrainer.__new__(CustomDPOTrainer)
    trainer.__dict__ |= {
        "loss_type": loss, "beta": 0.1, "label_smoothing": 0.0, "reference_free": False, "use_weighting": False,
        "f_divergence_type": "reverse_kl", "f_divergence_params": None, "bco_gemma": 0.0,
        "accelerator": SimpleNamespace(device=torch.device("cpu")),
        "finetuning_args": SimpleNamespace(use_ref_model=True),
    }  # fmt: skip
    logps = [torch.tensor([value]) for value in (-10.0, -13.0, -11.0, -12.0)]
    losses, _, _ = trainer.compute_preference_loss(*logps)
    # β (chosen - rejected, policy - reference) = 0.1 x 2; hinge would be 0.8, ipo (2 - 5)² = 9
    assert losses.item() == pytest.approx(-torch.nn.functional.logsigmoid(torch.tensor(0.2)).item())
