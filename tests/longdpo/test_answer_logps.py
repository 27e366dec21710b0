"""The head that gives log-probs: its numbers, its gradients, and how wide its tensors get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpofit.errors import BadInput
from tests.longdpo.runs import CHUNK_POSITIONS, Case, run

pytestmark = pytest.mark.stack

VOCABULARY, HIDDEN = 320, 32  # runs.shape


def head_results(count: int, chunk: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Log-probs and gradients of states and weight: of plain torch, then of the head."""
    import torch

    from dpofit.train import longdpo
    from dpofit.train.longdpo.answer_head import answer_head

    monkeypatch.setattr(longdpo, "CHUNK_POSITIONS", chunk)
    torch.manual_seed(count)
    head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
    states = torch.randn(count, 16, dtype=dtype, requires_grad=True)
    targets, upstream = torch.randint(0, 50, (count,)), torch.randn(count)
    results = []
    for compute in (
        lambda: head(states).float().log_softmax(-1).gather(1, targets[:, None])[:, 0],
        lambda: answer_head(head)(states, targets)[0],
    ):
        logps = compute()
        results.append((logps.detach(), *torch.autograd.grad(logps @ upstream, (states, head.weight))))
    return results


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 23, 200])
def test_log_probs_and_gradients_are_those_of_the_whole_softmax(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    plain, chunked = head_results(count, 4, torch.float32, monkeypatch)
    for one, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_bf16_gradients_are_rounded_once_like_a_single_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of the vocabulary add up in fp32: most values are stock's to the last bit, the rest one rounding off."""
    import torch

    plain, chunked = head_results(200, 4, torch.bfloat16, monkeypatch)
    for one, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
        assert (one == other).float().mean() > 0.97


def test_no_tensor_is_wider_than_a_chunk_of_positions_by_the_vocabulary(tmp_path: Path) -> None:
    """In a whole step of LLaMA-Factory's trainer, reference and backward too; weights and their gradients apart."""
    import torch

    from tests.longdpo.widest import Born

    def wide(tensor: torch.Tensor) -> bool:
        of_weights = tensor.numel() == VOCABULARY * HIDDEN
        return tensor.numel() > CHUNK_POSITIONS * VOCABULARY and VOCABULARY in tensor.shape and not of_weights

    shapes = {}
    for pieces in ((), ("answer_logps",)):
        with Born(wide) as born:
            run(Case(steps=1, batch=2), pieces, tmp_path)
        shapes[pieces] = born.shapes
    assert shapes[()]  # stock makes them: the watch can see
    assert shapes["answer_logps",] == set()


def test_backward_slices_the_vocabulary_to_the_same_size() -> None:
    """Its slices are narrower than the vocabulary, so the test above can't see them by their width."""
    import torch

    from dpofit.train import longdpo
    from dpofit.train.longdpo.answer_head import answer_head
    from tests.longdpo.widest import Born

    positions, vocabulary = 3 * longdpo.CHUNK_POSITIONS, 600
    head = answer_head(torch.nn.Linear(8, vocabulary, bias=False))
    states = torch.randn(positions, 8, requires_grad=True)
    with Born(lambda tensor: tensor.numel() > longdpo.CHUNK_POSITIONS * vocabulary) as born:
        logps, _ = head(states, torch.randint(0, vocabulary, (positions,)))
        logps.sum().backward()
    assert born.shapes == set()


def test_the_mean_of_logits_needs_no_logits() -> None:
    import torch

    from dpofit.train.longdpo.answer_head import answer_head

    head, states = torch.nn.Linear(8, 40, bias=False), torch.randn(3, 7, 8)
    every_logit = head(states).sum((1, 2))
    _, sums = answer_head(head)(states.flatten(0, 1), torch.zeros(21, dtype=torch.long), states.sum(1))
    torch.testing.assert_close(sums, every_logit.detach())


def test_labels_are_predicted_by_the_state_before_them() -> None:
    import torch

    from dpofit.train.longdpo.answer_logps import answer_positions

    labels = torch.tensor([[-100, -100, 7, 8, -100], [5, -100, -100, -100, 9]])
    positions, targets = answer_positions(labels)
    assert positions.tolist() == [1, 2, 8]  # of 10; the first label of row two has nothing before it
    assert targets.tolist() == [7, 8, 9]


@pytest.mark.parametrize("ld_alpha", [None, 0.3])
def test_sums_per_sequence_are_llama_factorys(ld_alpha: float | None) -> None:
    import torch
    from llamafactory.train.trainer_utils import get_batch_logps

    from dpofit.train.longdpo.answer_logps import answer_positions, sequence_logps

    torch.manual_seed(0)
    logits, labels = torch.randn(4, 12, 9), torch.full((4, 12), -100)
    for row, (start, end) in enumerate([(3, 9), (3, 12), (3, 6), (5, 11)]):
        labels[row, start:end] = torch.randint(0, 9, (end - start,))
    expected, lengths = get_batch_logps(logits, labels, ld_alpha=ld_alpha)
    positions, targets = answer_positions(labels)
    each = logits.flatten(0, 1)[positions].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    sums, counts = sequence_logps(each, labels, ld_alpha)
    torch.testing.assert_close(sums, expected)
    assert counts.tolist() == lengths.tolist()


def test_a_model_that_scales_its_logits_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from tests.longdpo.runs import ASSETS

    AutoConfig.for_model("gemma2", vocab_size=320).save_pretrained(tmp_path / "gemma")  # no weights
    AutoTokenizer.from_pretrained(ASSETS / "tokenizer").save_pretrained(tmp_path / "gemma")
    with pytest.raises(BadInput) as refused:
        run(Case(steps=1), ("answer_logps",), tmp_path, model_name_or_path=str(tmp_path / "gemma"))
    assert str(refused.value) == (
        "model: model_type: answer_logps does not know gemma2. Turn it off; known: llama, mistral, qwen2, qwen3."
    )


def test_a_quantized_or_adapted_head_is_refused() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from dpofit.train.longdpo.answer_head import answer_head

    config = Qwen2Config(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1)  # fmt: skip
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(TypeError, match="answer_logps needs a plain linear head, not Linear"):
        answer_head(model.get_output_embeddings())
    with pytest.raises(TypeError, match="needs a plain linear head"):
        answer_head(torch.nn.Linear(2, 2))


def test_sft_keeps_ligers_fused_loss_off() -> None:
    """It would take the place of the head, which then gives no log-probs."""
    from dpofit.train.longdpo.answer_logps import _keep_the_head

    asked = []
    _keep_the_head(lambda config, args, trainable, require_logits: asked.append(require_logits))(1, 2, True, False)
    assert asked == [True]


def test_without_its_keywords_a_model_is_stock(tmp_path: Path) -> None:
    """Generation, the tracer and anyone else still get logits while the piece is on."""
    import torch
    from transformers import AutoModelForCausalLM

    from dpofit.train import longdpo
    from tests.longdpo.runs import make_model

    model = AutoModelForCausalLM.from_pretrained(make_model(Case(), tmp_path))
    ids = torch.tensor([[3, 4, 5]])
    stock = model(ids).logits
    longdpo.install(("answer_logps", "shared_prompt"))
    try:
        assert torch.equal(model(ids).logits, stock)
        model(ids, labels=ids)  # the head is one that can give log-probs from now on
        assert torch.equal(model(ids).logits, stock)
    finally:
        longdpo.install(())
