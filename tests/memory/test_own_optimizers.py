"""LLaMA-Factory's own optimizers, against states counted in the real ones and what stops them when run."""

import json
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.memory.own_optimizers import update_for
from dpofit.memory.predict import predict
from dpofit.memory.tensors import Tensor
from dpofit.recipe.recipe import Badam, LowRank
from tests.memory.jobs import job, peaks, tiny, zero

COUNTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "optimizer_states.json").read_text())
ROLES = {"embed_tokens": ("embedding", (96, 64)), "lm_head": ("head", (96, 64)), "k_proj.bias": ("vector", (32,))}
GALORE = LowRank("galore", 8, ("all",), "std", False, False)


def _recipe(keys):
    for kind in ("galore", "apollo"):
        if f"use_{kind}" in keys:
            random = kind == "apollo" and keys["apollo_proj"] == "random"
            projection = keys.get(f"{kind}_proj_type", "std")
            return {"low_rank": LowRank(kind, keys[f"{kind}_rank"], ("all",), projection, random, False)}
    return keys


def _alone(**recipe):
    return job(tiny(), **{"nodes": 1, "gpus": 1, "prompt": 8, "response": 8, "optim": "adamw_torch", **recipe})


@pytest.mark.parametrize(
    "row", COUNTED["rows"], ids=lambda row: " ".join(map(str, [*row["keys"].values(), row["dtype"]]))
)
def test_states_are_those_counted_in_the_real_optimizer(row):
    recipe = _alone(**_recipe(row["keys"])).recipe
    element_bytes = {"bfloat16": 2, "float32": 4}[row["dtype"]]
    for name, counted in row["kept_bytes"].items():
        role, shape = ROLES.get(name, ("linear", COUNTED["shapes"].get(name)))
        kept = sum(update_for(recipe, Tensor(role, tuple(shape), 1, name), element_bytes).kept)
        heads = 4 * element_bytes if "use_adam_mini" in row["keys"] and name in ("q_proj", "k_proj") else 0
        assert counted - heads <= kept <= counted, name


def test_what_is_not_known_of_the_decomposition_is_noted():
    from dpofit.memory.notes import prediction_notes

    random = LowRank("apollo", 8, ("all",), "std", True, False)
    noted = [{note.id for note in prediction_notes(predict(_alone(low_rank=one)), True)} for one in (GALORE, random)]
    assert ["svd-workspace" in ids for ids in noted] == [True, False]


def test_layer_by_layer_no_gradient_waits_for_the_step():
    fields = {"pure_bf16": True, "stage": "sft"}
    layerwise = LowRank("galore", 8, ("all",), "std", False, True)
    whole, apart = (peaks(_alone(low_rank=one, **fields)) for one in (GALORE, layerwise))
    assert whole["optimizer_step"].breakdown["gradients"] == 2 * tiny().parameters
    assert "gradients" not in apart["optimizer_step"].breakdown


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"low_rank": GALORE, "zero": zero(2)}, "galore with DeepSpeed, which LLaMA-Factory refuses"),
        ({"low_rank": GALORE, "optim": "adamw_torch_fused"}, "adamw_torch_fused under use_galore"),
        ({"low_rank": LowRank("apollo", 8, ("all",), "left", True, False)}, "vector of the wrong side"),
        ({"use_muon": True, "zero": zero(2)}, "Muon under DeepSpeed"),
        ({"use_adam_mini": True, "zero": zero(3)}, "Adam-mini under DeepSpeed"),
        ({"use_adam_mini": True, "finetuning": "lora"}, "Adam-mini on adapters"),
    ],
)  # fmt: skip
def test_what_fails_when_run_is_refused_with_its_reason(recipe, named):
    with pytest.raises(BadInput, match=named):
        predict(_alone(**recipe))


def test_muons_last_update_is_still_held_while_adam_updates_the_tables():
    model = tiny(vocab=50_000)
    step = peaks(job(model, gpus=1, zero=None, prompt=64, response=64, use_muon=True))["optimizer_step"]
    adam, last = 2 * 50_000 * 64 * 4, 256 * 64 * 2  # a table's square root and quotient; down_proj's update in bf16
    assert step.breakdown["optimizer_workspace"] == adam + last


BADAM = Badam("layer", "ascending")
LAYER = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 256 + 2 * 64  # of tiny(): q, k, v with biases, o, MLP


def test_badam_keeps_bf16_weights_and_for_one_layer_a_master_and_two_moments():
    found = peaks(_alone(badam=BADAM, stage="sft"))
    assert found["load"].breakdown["weights"] == 2 * tiny().parameters
    step = found["optimizer_step"].breakdown
    assert step["optimizer"] == (4 + 4 + 4) * LAYER
    assert step["gradients"] == 4 * LAYER  # the layer's, in fp32: the bf16 ones have gone


def test_of_all_turns_badam_shows_the_one_that_needs_most():
    """With layer 0 in training, layers 1 to 3 have no checkpoints."""
    fields = {"prompt": 512, "response": 512, "stage": "sft"}
    turns = [peaks(_alone(badam=Badam("layer", "fixed", layer), **fields))["backward"].size_bytes for layer in range(4)]
    assert turns == sorted(turns, reverse=True) and turns[0] > turns[3]
    for mode in ("ascending", "descending", "random"):
        assert peaks(_alone(badam=Badam("layer", mode), **fields))["backward"].size_bytes == turns[0]


@pytest.mark.parametrize(
    ("badam", "recipe", "named"),
    [
        (Badam("ratio", "ascending"), {}, "BAdam by ratio"),
        (BADAM, {"gpus": 2}, "BAdam on 2 GPUs without ZeRO-3, which LLaMA-Factory refuses"),
        (BADAM, {"zero": zero(2)}, "BAdam with DeepSpeed below stage 3, which LLaMA-Factory refuses"),
        (BADAM, {"optim": "sgd"}, "sgd under use_badam"),
        (BADAM, {"finetuning": "freeze"}, "BAdam with freeze"),
        (Badam("layer", "fixed"), {}, "fixed without badam_start_block"),
        (Badam("layer", "random", 1), {}, "random with badam_start_block"),
        (Badam("layer", "ascending", 4), {}, "no layer is number 4"),
        (Badam("layer", "ascending", None, -1), {}, "a switch at every step, which -1 is to badam"),
    ],
)
def test_what_of_badam_fails_or_is_not_modelled_is_refused(badam, recipe, named):
    with pytest.raises(BadInput, match=named):
        predict(_alone(badam=badam, **recipe))
