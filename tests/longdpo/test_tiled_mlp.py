"""Tiling changes how large an MLP's working set is, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

pytestmark = pytest.mark.stack

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dpofit.errors import BadInput  # noqa: E402
from dpofit.train.longdpo import tiled_mlp  # noqa: E402
from tests.longdpo.runs import times_further  # noqa: E402

TILE = 16
WIDTH, INTERMEDIATE = 32, 72


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", TILE)
    yield


def model(family: str, dtype: Any = torch.float32, checkpointing: bool = True, seed: int = 2, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=WIDTH, intermediate_size=INTERMEDIATE, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, **changes,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).train()
    if checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": True})
        made.enable_input_require_grads()
    return made


def gradients(of: Any) -> dict[str, Any]:
    ids = torch.arange(2 * 37).reshape(2, 37) % 60  # 74 tokens: five tiles, none of them whole rows
    of(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad.double() for name, parameter in of.named_parameters()}


def error(mine: dict[str, Any], true: dict[str, Any]) -> float:
    return max(float((mine[name] - true[name]).norm() / true[name].norm()) for name in true)


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_are_stocks(family: str, checkpointing: bool) -> None:
    stock, tiled = model(family, checkpointing=checkpointing), model(family, checkpointing=checkpointing)
    tiled_mlp.tile(tiled)
    assert error(gradients(tiled), gradients(stock)) < 1e-5


def test_every_weight_gets_one_gradient_however_many_tiles() -> None:
    tiled = model("qwen2")
    tiled_mlp.tile(tiled)
    fired: list[str] = []
    for name, parameter in tiled.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    gradients(tiled)
    assert sorted(fired) == sorted(name for name, _ in tiled.named_parameters())


def test_nothing_as_wide_as_the_mlp_is_longer_than_a_tile() -> None:
    tiled = model("qwen2")
    tiled_mlp.tile(tiled)
    longest = 0

    class Widest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal longest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 3 and result.shape[-1] == INTERMEDIATE:
                longest = max(longest, result.shape[0] * result.shape[1])
            return result

    with Widest():
        gradients(tiled)
    assert 0 < longest <= TILE


def test_under_checkpointing_tiles_are_computed_as_often_as_stock_computes_the_whole() -> None:
    tiled = model("qwen2")
    tokens: list[int] = []
    for layer in tiled.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, args, out: tokens.append(out.shape[0] * out.shape[1]))
    gradients(tiled)
    stock_tokens = sum(tokens)
    tokens.clear()
    tiled_mlp.tile(tiled)
    gradients(tiled)
    assert sum(tokens) == stock_tokens == 2 * 2 * 74  # two layers, forward and one recomputation


def test_a_layer_that_reads_the_mlps_output_recomputes_it_too() -> None:
    tiled = model("gemma2")  # a norm follows the MLP
    tiled_mlp.tile(tiled)
    tokens: list[int] = []
    for layer in tiled.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, args, out: tokens.append(out.shape[0] * out.shape[1]))
    gradients(tiled)
    assert sum(tokens) == 3 * 2 * 74


def off(found: dict[str, Any], true: dict[str, Any]) -> float:
    return float(sum((found[name] - true[name]).norm() ** 2 for name in true if "mlp" in name) ** 0.5)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_many_tiles_are_no_further_from_fp32_than_stock(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", 2)  # 37 tiles
    assert times_further(*bf16_pairs(autocast))[0] <= 1.0005


def test_the_comparison_sees_parts_that_are_rounded_before_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd gives them; 3 % further off, whatever the number of tiles."""
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", 2)
    monkeypatch.setattr(tiled_mlp, "unrounded_linears", lambda *_: nullcontext())
    assert times_further(*bf16_pairs(autocast=False))[0] > 1.01


def bf16_pairs(autocast: bool) -> tuple[list[float], list[float]]:
    """Errors of the MLPs' gradients, with stock code and tiled, of eight models."""
    theirs, mine = [], []
    for seed in range(8):
        true = gradients(model("llama", torch.bfloat16, seed=seed).float())
        stock, tiled = (model("llama", torch.bfloat16, seed=seed) for _ in range(2))
        tiled_mlp.tile(tiled)
        for errors, one in ((theirs, stock), (mine, tiled)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                errors.append(off(gradients(one.float() if autocast else one), true))
    return theirs, mine


def test_biases_are_summed_like_weights() -> None:
    """A llama with `mlp_bias`, in bf16: as far from fp32 as stock's."""
    true = gradients(model("llama", torch.bfloat16, mlp_bias=True).float())
    stock, tiled = (model("llama", torch.bfloat16, mlp_bias=True) for _ in range(2))
    tiled_mlp.tile(tiled)
    mine, theirs = gradients(tiled), gradients(stock)
    assert {name for name in mine if "mlp" in name} == {name for name in true if "mlp" in name}
    assert off(mine, true) <= 1.01 * off(theirs, true)


def test_autocast_holds_in_backward_too() -> None:
    stock, tiled = model("qwen2"), model("qwen2")
    tiled_mlp.tile(tiled)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = gradients(tiled), gradients(stock)
    assert error(mine, theirs) < 0.02
    assert {gradient.dtype for gradient in mine.values()} == {torch.float64}  # fp32 weights, as compared


def test_a_mixture_of_experts_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
    )  # fmt: skip
    with pytest.raises(BadInput, match=r"tiled_mlp can't split Qwen3MoeSparseMoeBlock"):
        tiled_mlp.tile(AutoModelForCausalLM.from_config(config))


def test_dropout_inside_the_mlp_is_refused_by_name() -> None:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model("qwen2"), LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.1))
    tiled_mlp.tile(made)
    with pytest.raises(BadInput, match="lora_dropout"):
        made.train()(input_ids=torch.ones(1, 64, dtype=torch.long))
