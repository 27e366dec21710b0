"""shared_prompt through flash attention: transformers' own code around it, real; the CUDA kernels written out in torch.

What is shown is that the arguments mean the right attention. That a GPU's kernels do what their documentation says
is not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

torch = pytest.importorskip("torch")

from tests.longdpo.conftest import AssertSame  # noqa: E402
from tests.longdpo.flash import attend, in_place_of_the_kernels  # noqa: E402
from tests.longdpo.runs import Case, errors, make_model, run  # noqa: E402
from tests.longdpo.test_shared_prompt import LAYOUTS, PROMPT, padded  # noqa: E402


@pytest.mark.parametrize(
    ("queries", "keys", "seen"),
    [(2, 5, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]), (5, 2, [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])],
)
def test_the_stand_in_masks_as_flash_attns_documentation_shows(queries: int, keys: int, seen: list[list[int]]) -> None:
    """Equal scores give equal weights to what is seen; values that are unit vectors show the weights."""
    weights = attend(torch.zeros(queries, 1, keys), torch.zeros(keys, 1, keys), torch.eye(keys)[:, None], None)
    expected = torch.tensor(seen, dtype=torch.float32)
    torch.testing.assert_close(weights[:, 0], expected / expected.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_calls_without_mask_or_positions_are_stocks_two_rows(layout: str, tmp_path: Path) -> None:
    """Stock unpads its rows and calls the kernel of variable length."""
    from transformers import AutoModelForCausalLM

    from dpofit.train import longdpo
    from dpofit.train.longdpo.shared_row import shared_row

    chosen, rejected, (prompt, of_chosen, of_rejected) = LAYOUTS[layout]
    model = AutoModelForCausalLM.from_pretrained(make_model(Case(), tmp_path)).model
    model.config._attn_implementation = "flash_attention_2"
    ids, mask = padded(chosen, rejected)
    longdpo.install(PROMPT)
    try:
        with in_place_of_the_kernels() as calls:
            stock = model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
            tokens = len(chosen) + len(rejected)
            assert calls == [("flash_attn_varlen_func", tokens, tokens)] * 2  # two layers
            calls.clear()
            states = model(input_ids=ids, attention_mask=mask, shared_prompt=shared_row(ids, mask)).last_hidden_state
    finally:
        longdpo.install(())
    first, second = prompt + of_chosen, prompt + of_rejected
    assert calls == [("flash_attn_func", first, first), ("flash_attn_func", of_rejected, second)] * 2
    torch.testing.assert_close(states, stock, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_training_is_the_same(tuning: str, tmp_path: Path, assert_same: AssertSame) -> None:
    """Recomputation in the backward pass included."""
    case = Case("llama", tuning, steps=3)
    with in_place_of_the_kernels() as calls:
        stock = run(case, (), tmp_path)
        assert {name for name, _, _ in calls} == {"flash_attn_varlen_func"}
        calls.clear()
        long = run(case, PROMPT, tmp_path)
        assert {name for name, _, _ in calls} == {"flash_attn_func"}
    assert_same({(case, PROMPT): errors(stock, long)})
