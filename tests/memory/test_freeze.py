"""Freeze tuning: which weights are trained, and what a layer that isn't costs."""

import pytest

from dpofit.errors import BadInput
from dpofit.memory.disk import disk_use
from dpofit.memory.scope import check_scope
from dpofit.memory.speed import step_time
from tests.memory.jobs import job, peaks, tiny

HIDDEN, VOCAB = 64, 1000
LINEARS = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 256  # q, k, v with biases, o, and the MLP
LAYER = LINEARS + 2 * HIDDEN


def freeze(**fields):
    return job(tiny(layers=4), finetuning="freeze", prompt=120, response=8, gpus=1, nodes=1, **fields)


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, 2 * LAYER),
        ({"freeze_layers": -1}, LAYER),
        ({"freeze_layers": 9}, 4 * LAYER),
        ({"freeze_layers": 1, "freeze_modules": ("mlp",)}, 3 * 64 * 256),
        ({"freeze_layers": 1, "freeze_modules": ("self_attn", "input_layernorm")}, LAYER - 3 * 64 * 256 - HIDDEN),
        ({"freeze_layers": 1, "freeze_extra": ("lm_head",)}, LAYER + VOCAB * HIDDEN),
        # "norm" is looked for anywhere in a name, so the layers' norms are trained too
        ({"freeze_layers": 1, "freeze_extra": ("norm",)}, LAYER + (2 * 3 + 1) * HIDDEN),
    ],
)
def test_the_weights_named_are_trained(fields, trained):
    assert freeze(**fields).trained_parameters == trained


def test_layers_below_the_trained_ones_save_nothing_and_get_no_gradient():
    checkpoint = 2 * 128 * HIDDEN * 2  # rows x tokens x hidden x bf16
    assert peaks(freeze(freeze_layers=1))["loss"].breakdown["checkpoints"] == checkpoint
    assert peaks(freeze(freeze_layers=3))["loss"].breakdown["checkpoints"] == 3 * checkpoint


def test_layers_above_the_trained_ones_are_not_checkpointed():
    first, last = (peaks(freeze(freeze_layers=count))["loss"].breakdown for count in (-1, 1))
    assert first.get("activations", 0) > last.get("activations", 0)


def test_a_frozen_weight_has_no_gradient_no_moments_and_stays_bf16():
    planned = peaks(freeze())
    assert planned["load"].breakdown["weights"] == 2 * freeze().model.parameters + 2 * 2 * LAYER
    assert planned["optimizer_step"].breakdown["optimizer"] == 8 * 2 * LAYER
    assert planned["optimizer_step"].breakdown["gradients"] == 4 * 2 * LAYER


def test_a_checkpoint_has_frozen_weights_in_bf16_and_states_of_the_trained():
    planned = freeze()
    frozen = planned.model.parameters - 2 * LAYER
    assert disk_use(planned).checkpoint_bytes == 2 * frozen + 4 * 2 * LAYER + 8 * 2 * LAYER


def test_freezing_keeps_a_second_model_as_reference():
    assert peaks(freeze())["load"].breakdown["reference"] == 2 * freeze().model.parameters


def test_names_that_no_module_has_are_refused_with_those_it_has():
    planned = freeze(freeze_modules=("mlp", "attn"), freeze_extra=("wte",))
    with pytest.raises(BadInput) as refused:
        check_scope(planned.recipe, planned.model)
    attn, wte = refused.value.problems
    assert (attn.key, wte.key) == ("freeze_trainable_modules", "freeze_extra_modules")
    assert "attn" in attn.wrong and "self_attn" in attn.right
    assert "embed_tokens, norm, lm_head" in wte.right


def test_only_layers_that_train_are_recomputed():
    def recomputing(layers: int) -> float:
        kept, again = (freeze(freeze_layers=layers, gradient_checkpointing=on) for on in (False, True))
        return step_time(again).compute_s - step_time(kept).compute_s

    assert recomputing(1) == pytest.approx(recomputing(4) / 4)
