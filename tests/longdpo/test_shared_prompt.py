"""A pair as one row: what it shares, how it attends, and which runs it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpofit.errors import BadInput
from tests.longdpo.runs import Case, run

pytestmark = pytest.mark.stack

PROMPT = ("shared_prompt",)
# Two rows of a pair without padding → prompt, chosen and rejected of the shared row.
LAYOUTS = {
    "prompt and answers": ([1, 2, 3, 4, 5], [1, 2, 3, 6], (3, 2, 1)),
    "answers that begin alike share that too": ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], (4, 1, 2)),
    "prompts that truncation left different": ([1, 2, 9, 4], [1, 2, 8, 4, 4], (2, 2, 3)),
    "nothing in common": ([1, 2, 3], [4, 5], (0, 3, 2)),
    "one row is the other's beginning": ([1, 2, 3], [1, 2, 3, 4], (2, 1, 2)),
    "the same row twice": ([1, 2, 3], [1, 2, 3], (2, 1, 1)),
    "an empty answer": ([1, 2], [1, 2, 3, 4], (1, 1, 3)),
}


def padded(*rows: list[int]) -> tuple[Any, Any]:
    import torch

    longest = -(-max(len(row) for row in rows) // 8) * 8
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


@pytest.mark.parametrize(("chosen", "rejected", "parts"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_row_holds_what_both_share_once(chosen: list[int], rejected: list[int], parts: tuple[int, ...]) -> None:
    import torch

    from dpofit.train.longdpo.shared_row import joined, parted, positions, shared_row

    ids, mask = padded(chosen, rejected)
    row = shared_row(ids, mask)
    assert (row.prompt, row.chosen, row.rejected) == parts
    assert joined(row, ids).tolist() == [chosen + rejected[row.prompt :]]
    places = [*range(len(chosen)), *range(row.prompt, len(rejected))]
    assert positions(row, torch.device("cpu")).tolist() == [places]
    back = parted(row, joined(row, ids)[..., None].float())
    assert back[..., 0].long().tolist() == (ids * mask).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_layout_gives_the_states_of_two_rows(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from dpofit.train import longdpo
    from dpofit.train.longdpo.shared_row import shared_row
    from tests.longdpo.runs import make_model

    model = AutoModelForCausalLM.from_pretrained(make_model(Case(family), tmp_path)).model
    longdpo.install(PROMPT)
    try:
        for chosen, rejected, _ in LAYOUTS.values():
            ids, mask = padded(chosen, rejected)
            stock = model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
            row = shared_row(ids, mask)
            shared = model(input_ids=ids, attention_mask=mask, shared_prompt=row).last_hidden_state
            torch.testing.assert_close(shared, stock, rtol=1e-5, atol=1e-5)
    finally:
        longdpo.install(())


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 4), (4, 9)])
def test_rejected_queries_see_the_keys_before_them(queries: int, keys: int) -> None:
    """Against a softmax written out."""
    import torch

    from dpofit.train.longdpo.shared_attention import lower_right_sdpa

    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key, value = torch.randn(1, 4, queries, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    ours, _ = lower_right_sdpa(module, query, key, value, scaling=0.5)
    for head in range(4):
        for place in range(queries):
            seen = keys - queries + place + 1
            weights = (query[0, head, place] @ key[0, head // 2, :seen].T * 0.5).softmax(-1)
            torch.testing.assert_close(ours[0, place, head], weights @ value[0, head // 2, :seen])


def test_no_mask_as_large_as_the_row_squared_is_made(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from dpofit.train import longdpo
    from dpofit.train.longdpo.shared_row import shared_row
    from tests.longdpo.runs import make_model
    from tests.longdpo.widest import Born

    model = AutoModelForCausalLM.from_pretrained(make_model(Case(), tmp_path)).model
    prompt = list(range(3, 203))
    ids, mask = padded([*prompt, 7, 8, 9], [*prompt, 5])

    def square(tensor: torch.Tensor) -> bool:
        return tensor.dim() >= 2 and min(tensor.shape[-2:]) >= len(prompt)

    longdpo.install(PROMPT)
    try:
        with Born(square) as shared:
            model(input_ids=ids, attention_mask=mask, shared_prompt=shared_row(ids, mask))
        with Born(square) as stock:
            model(input_ids=ids, attention_mask=mask)
    finally:
        longdpo.install(())
    assert shared.shapes == set()
    assert (2, 1, 208, 208) in stock.shapes  # its padding mask: the watch can see


REFUSED = {
    "mistral with a window": ("mistral", {"sliding_window": 4096}, "sliding_window: is in use"),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window: is in use"),
    "frequencies of the longest row": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type: is dynamic",
    ),
    "another family": ("gemma2", {}, "model_type: shared_prompt does not know gemma2"),
    "eager attention": ("qwen3", {"attn_implementation": "eager"}, "attn_implementation: is eager"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "text"), REFUSED.values(), ids=REFUSED)
def test_models_it_is_not_exact_on_are_refused_by_name(family: str, changes: dict[str, Any], text: str) -> None:
    from transformers import AutoConfig

    from dpofit.train.longdpo.shared_prompt import model_problems

    (problem,) = model_problems(AutoConfig.for_model(family, **changes))
    assert text in str(problem)
    assert problem.right


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_four_families_are_taken(family: str) -> None:
    from transformers import AutoConfig

    from dpofit.train.longdpo.shared_prompt import model_problems

    changes = {"sliding_window": None} if family == "mistral" else {}
    assert model_problems(AutoConfig.for_model(family, **changes)) == []


def test_a_refusal_comes_before_any_weight_is_loaded(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from tests.longdpo.runs import ASSETS

    AutoConfig.for_model("mistral", vocab_size=320).save_pretrained(tmp_path / "mistral")  # no weights; has a window
    AutoTokenizer.from_pretrained(ASSETS / "tokenizer").save_pretrained(tmp_path / "mistral")
    with pytest.raises(BadInput, match="shared_prompt needs whole attention"):
        run(Case(steps=1), PROMPT, tmp_path, model_name_or_path=str(tmp_path / "mistral"))


def test_more_pairs_than_one_are_refused(tmp_path: Path) -> None:
    """The recipe's check says it first (recipe/long_context.py); this is for a trainer started without it."""
    with pytest.raises(ValueError, match="one pair at a time, not 2"):
        run(Case(steps=1, batch=2), PROMPT, tmp_path)
