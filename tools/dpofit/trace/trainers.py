"""The trainer of each stage, holding what its loss path reads (its `__init__` would want datasets), and its batch."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from dpofit.trace.device import GPU
from dpofit.trace.request import TraceRequest


def make_stage_trainer(request: TraceRequest, model: torch.nn.Module, reference: Any, finetuning_args: Any) -> Any:
    """A trainer of `request.stage`; `model` may be an engine."""
    trainer = _MAKERS[request.stage](model, finetuning_args)
    finetuning_args.use_ref_model = uses_reference(request)
    trainer.finetuning_args = finetuning_args
    trainer.ref_model = reference
    trainer.model = trainer.model_wrapped = model
    trainer.args = SimpleNamespace(device=GPU, average_tokens_across_devices=False, n_gpu=1)
    return trainer


def uses_reference(request: TraceRequest) -> bool:
    return request.stage == "kto" or (request.stage == "dpo" and request.pref_loss not in ("orpo", "simpo"))


def rows_of_one(request: TraceRequest) -> int:
    """Rows of one sample of the micro-batch: DPO and RM have pairs."""
    return 2 if request.stage in ("dpo", "rm") else 1


def _sft(model: torch.nn.Module, finetuning_args: Any) -> Any:
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    trainer = CustomSeq2SeqTrainer.__new__(CustomSeq2SeqTrainer)
    trainer.compute_loss_func = None
    trainer.label_smoother = None
    trainer.model_accepts_loss_kwargs = True
    return trainer


def _rm(model: torch.nn.Module, finetuning_args: Any) -> Any:
    from llamafactory.train.rm.trainer import PairwiseTrainer

    return PairwiseTrainer.__new__(PairwiseTrainer)


def _dpo(model: torch.nn.Module, finetuning_args: Any) -> Any:
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    trainer = _without_dropout(CustomDPOTrainer, model, finetuning_args)
    trainer.f_divergence_type = "reverse_kl"
    trainer.reference_free = False
    trainer.loss_type = finetuning_args.pref_loss
    trainer.ftx_gamma = finetuning_args.pref_ftx
    trainer.bco_gemma = finetuning_args.pref_bco_weight
    trainer.label_smoothing = finetuning_args.dpo_label_smoothing
    trainer.simpo_gamma = finetuning_args.simpo_gamma
    trainer.ld_alpha = finetuning_args.ld_alpha
    if trainer.bco_gemma > 1e-6:
        from trl.trainer.utils import RunningMoments

        trainer.running = RunningMoments(None)
    return trainer


def _kto(model: torch.nn.Module, finetuning_args: Any) -> Any:
    from llamafactory.train.kto.trainer import CustomKTOTrainer

    trainer = _without_dropout(CustomKTOTrainer, model, finetuning_args)
    trainer.desirable_weight = finetuning_args.kto_chosen_weight
    trainer.undesirable_weight = finetuning_args.kto_rejected_weight
    trainer.ftx_gamma = finetuning_args.pref_ftx
    trainer.calculate_KL = True
    trainer.loss_type = "kto"
    return trainer


def _without_dropout(kind: Any, model: torch.nn.Module, finetuning_args: Any) -> Any:
    from trl.trainer import disable_dropout_in_model

    disable_dropout_in_model(model)
    trainer = kind.__new__(kind)
    trainer.label_pad_token_id = -100
    trainer._stored_metrics = defaultdict(lambda: defaultdict(list))
    trainer.beta = finetuning_args.pref_beta
    return trainer


_MAKERS = {"sft": _sft, "rm": _rm, "dpo": _dpo, "kto": _kto}


def batch_of(request: TraceRequest) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels as the stage's collator gives them; KTO's mismatched answers are as long."""
    shape = (request.rows, request.tokens)
    names = ["input_ids", "attention_mask", *(["labels"] if request.stage != "rm" else [])]
    if request.stage == "kto":
        names += [f"kl_{name}" for name in names]
    batch = {name: torch.ones(shape, dtype=torch.int64, device=GPU) for name in names}
    if request.packed:  # data/collator.py SFTDataCollatorWith4DAttentionMask
        batch["position_ids"] = torch.ones(shape, dtype=torch.int64, device=GPU)
        del batch["attention_mask"]
        if request.attention == "fa2":
            batch["attention_mask"] = None  # type: ignore[assignment]
        else:
            square = (request.rows, 1, request.tokens, request.tokens)
            batch["attention_mask"] = torch.ones(square, dtype=torch.bfloat16, device=GPU)
    if request.stage == "kto":
        batch["kto_tags"] = torch.ones(request.rows, dtype=torch.bool, device=GPU)
    return batch


def loss_of(request: TraceRequest, trainer: Any, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """The stage's loss, as Trainer.training_step asks for it."""
    if request.stage == "sft":
        tokens = torch.tensor(request.rows * request.tokens, device=GPU)
        return trainer.compute_loss(model, batch, num_items_in_batch=tokens)
    if request.stage == "rm":
        return trainer.compute_loss(model, batch)
    return trainer.get_batch_loss_metrics(model, batch)[0]
