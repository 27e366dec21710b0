"""Checkpoints that waited in host memory train the same model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

torch = pytest.importorskip("torch")

from dpofit.errors import BadInput  # noqa: E402
from dpofit.train.longdpo import offload_checkpoints  # noqa: E402
from tests.longdpo.runs import Case, run  # noqa: E402


def test_every_layers_input_is_kept_and_fetched_once_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = offload_checkpoints.layer_inputs(torch.device("cpu"))
    seen: list[tuple[str, float]] = []
    keep, fetch = inputs.keep, inputs.fetch
    monkeypatch.setattr(inputs, "keep", lambda hidden: (seen.append(("keep", hidden[0].item())), keep(hidden))[1])

    def fetched(kept: offload_checkpoints.Kept) -> torch.Tensor:
        tensor = fetch(kept)
        seen.append(("fetch", tensor[0].item()))
        return tensor

    monkeypatch.setattr(inputs, "fetch", fetched)
    hidden = torch.ones(4, requires_grad=True)
    result = hidden
    for _ in range(3):
        result = offload_checkpoints.offloaded(lambda given: given * 2, result)
    result.sum().backward()
    assert seen == [("keep", 1), ("keep", 2), ("keep", 4), ("fetch", 4), ("fetch", 2), ("fetch", 1)]
    assert hidden.grad is not None and hidden.grad.tolist() == [8] * 4


def test_a_pass_without_gradients_keeps_nothing() -> None:
    inputs = offload_checkpoints.layer_inputs(torch.device("cpu"))
    with torch.no_grad():
        offload_checkpoints.offloaded(lambda given: given * 2, torch.ones(4))
    assert inputs.stack.used_bytes == 0


@pytest.mark.parametrize(("key", "value"), [("disable_gradient_checkpointing", True), ("use_reentrant_gc", False)])
def test_what_leaves_nothing_to_offload_is_refused(key: str, value: bool, tmp_path: Path) -> None:
    case = Case(steps=1, extra=((key, value),))
    with pytest.raises(BadInput, match=key):
        run(case, ("offload_checkpoints",), tmp_path)


def test_random_numbers_are_replayed_as_stock_replays_them() -> None:
    def gradient(checkpoint: object) -> torch.Tensor:
        torch.manual_seed(3)
        hidden = torch.ones(64, requires_grad=True)
        checkpoint(lambda given: torch.nn.functional.dropout(given, 0.5), hidden).sum().backward()  # type: ignore[operator]
        assert hidden.grad is not None
        return hidden.grad

    from torch.utils.checkpoint import checkpoint

    stock = gradient(lambda function, hidden: checkpoint(function, hidden, use_reentrant=True))
    assert torch.equal(gradient(offload_checkpoints.offloaded), stock)
    assert set(stock.tolist()) == {0.0, 2.0}
