"""A DeepSpeed config is found where people put it and read as DeepSpeed reads it."""

import json
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe.deepspeed_examples import EXAMPLES
from dpofit.recipe.keys import deepspeed_keys
from dpofit.recipe.load import load_recipe, read_recipe
from dpofit.recipe.zero import _HARMLESS_SECTIONS, _MEMORY_SECTIONS, _ZERO_HARMLESS, _ZERO_READ

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def zero(path, *overrides):
    return load_recipe(path, overrides, {}).recipe.zero


def problems(path):
    with pytest.raises(BadInput) as bad:
        load_recipe(path, (), {})
    return [(problem.key, problem.wrong, problem.right) for problem in bad.value.problems]


def ids(path):
    return [issue.id for issue in read_recipe(path, (), {}).issues]


def test_absent_keys_have_deepspeeds_defaults_which_depend_on_the_stage(write):
    stage3 = zero(write(deepspeed={"zero_optimization": {"stage": 3}}))
    assert (stage3.overlap_comm, stage3.contiguous_gradients, stage3.reduce_scatter) == (True, True, True)
    assert (stage3.reduce_bucket_size, stage3.allgather_bucket_size) == (500_000_000, 500_000_000)
    assert (stage3.prefetch_bucket_size, stage3.param_persistence_threshold) == (50_000_000, 100_000)
    assert (stage3.max_live_parameters, stage3.max_reuse_distance, stage3.sub_group_size) == (10**9, 10**9, 10**9)
    assert (stage3.offload_optimizer, stage3.offload_param, stage3.gather_16bit_weights_on_save) == (
        "none",
        "none",
        False,
    )
    assert zero(write(deepspeed={"zero_optimization": {"stage": 2}})).overlap_comm is False


def test_auto_stays_only_where_transformers_fills_it(write):
    config = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
        "overlap_comm": "auto",
    }
    found = zero(write(deepspeed={"zero_optimization": config}))
    assert (found.reduce_bucket_size, found.prefetch_bucket_size, found.param_persistence_threshold) == ("auto",) * 3
    assert (found.max_live_parameters, found.overlap_comm) == (10**9, True)
    # transformers looks for the stage3_ names only
    assert (
        zero(write(deepspeed={"zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}})).prefetch_bucket_size
        == 50_000_000
    )


def test_floats_and_digits_count_as_whole_numbers(write):
    found = zero(
        write(deepspeed={"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": "300"}})
    )
    assert (found.reduce_bucket_size, found.allgather_bucket_size) == (200_000_000, 300)


def test_no_zero_section_is_stage_0(write):
    assert zero(write(deepspeed={"train_batch_size": "auto"})).stage == 0


def test_deprecated_spellings_are_followed(write):
    found = zero(
        write(
            deepspeed={
                "zero_optimization": {
                    "stage": 3,
                    "cpu_offload": True,
                    "cpu_offload_param": True,
                    "stage3_gather_fp16_weights_on_model_save": True,
                }
            }
        )
    )
    assert (found.offload_optimizer, found.offload_param, found.gather_16bit_weights_on_save) == ("cpu", "cpu", True)
    assert zero(write(deepspeed={"zero_optimization": True})).stage == 1


def test_offload_is_read_with_its_pinning(write):
    section = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme"},
    }
    found = zero(write(deepspeed={"zero_optimization": section}))
    assert (found.offload_optimizer, found.optimizer_pin_memory) == ("cpu", True)
    assert (found.offload_param, found.param_pin_memory) == ("nvme", False)


def test_every_bad_key_and_value_is_told_at_once(write):
    path = write(
        deepspeed={
            "zero_optimization": {
                "stage": 5,
                "overlap_com": True,
                "reduce_bucket_size": "big",
                "offload_param": {"device": "gpu", "pin": True},
                "offload_optimizer": "cpu",
            }
        }
    )
    assert problems(path) == [
        ("zero_optimization.overlap_com", "is not a key of DeepSpeed's ZeRO", "Did you mean overlap_comm?"),
        ("zero_optimization.stage", "is 5", "Choose 0, 1, 2 or 3."),
        ("zero_optimization.offload_optimizer", "is not an object", 'Write {"device": "cpu", "pin_memory": true}.'),
        ("zero_optimization.offload_param.pin", "is not a key of DeepSpeed's offload", "Remove it."),
        ("zero_optimization.offload_param.device", "is 'gpu'", "Choose none, cpu or nvme."),
        ("zero_optimization.reduce_bucket_size", "is 'big'", "Give a whole number, 0 or more."),
    ]


def test_numbers_that_differ_from_the_recipes_are_refused(write):
    path = write(
        deepspeed={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": False},
            "gradient_clipping": 1.0,
            "train_batch_size": 64,
        }
    )
    assert ids(path) == ["config.deepspeed-mismatch", "config.deepspeed-mismatch", "config.deepspeed-batch"]


def test_a_misspelled_section_is_told_because_deepspeed_ignores_it(write):
    assert ids(write(deepspeed={"zero_optimisation": {"stage": 3}})) == ["config.deepspeed-ignored-key"]


def test_memory_keys_beside_those_modelled_are_listed(write):
    recipe = load_recipe(
        write(
            deepspeed={
                "optimizer": {"type": "AdamW"},
                "steps_per_print": 10,
                "tensor_parallel": {"autotp_size": 2},
                "zero_force_ds_cpu_optimizer": True,
                "zero_optimization": {
                    "stage": 3,
                    "zero_hpz_partition_size": 8,
                    "zero_quantized_weights": False,
                    **GATHER,
                },
            }
        ),
        (),
        {},
    ).recipe
    assert recipe.unmodelled == (
        "deepspeed.optimizer",
        "deepspeed.tensor_parallel",
        "deepspeed.zero_optimization.zero_hpz_partition_size",
    )


class TestFinding:
    def test_a_file_in_the_working_directory_comes_first(self, write, tmp_path):
        for folder, stage in ((Path.cwd(), 1), (tmp_path, 2)):
            (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        loaded = load_recipe(write(deepspeed="ds.json"), (), {})
        assert (loaded.recipe.zero.stage, loaded.notes) == (1, ())

    def test_a_file_beside_the_recipe_is_used_with_a_note(self, write, tmp_path):
        (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
        loaded = load_recipe(write(deepspeed="ds.json"), (), {})
        assert (loaded.recipe.zero.stage, [note.id for note in loaded.notes]) == (2, ["deepspeed-beside-recipe"])

    def test_a_missing_example_has_its_known_content_with_a_note(self, write):
        loaded = load_recipe(write(deepspeed="examples/deepspeed/ds_z3_offload_config.json"), (), {})
        assert (loaded.recipe.zero.offload_param, loaded.recipe.zero.param_pin_memory) == ("cpu", True)
        assert [note.id for note in loaded.notes] == ["deepspeed-example"]

    def test_any_other_missing_file_is_bad_input(self, write, tmp_path):
        (problem,) = problems(write(deepspeed="mine.json"))
        assert problem == (
            "deepspeed",
            "names a file that does not exist: mine.json",
            f"Put it at mine.json or {tmp_path}/mine.json.",
        )

    def test_json_text_is_read_as_transformers_reads_it(self, write):
        assert zero(write(deepspeed='{"zero_optimization": {"stage": 1}}')).stage == 1

    def test_broken_json_is_bad_input_with_its_line(self, write, tmp_path):
        (tmp_path / "ds.json").write_text('{\n "zero_optimization": {\n')
        with pytest.raises(BadInput) as bad:
            load_recipe(write(deepspeed="ds.json"), (), {})
        assert bad.value.problems[0].where == f"{tmp_path}/ds.json:3"

    def test_an_override_changes_an_inline_config(self, write):
        assert (
            zero(write(deepspeed={"zero_optimization": {"stage": 2}}), "deepspeed.zero_optimization.stage=3").stage == 3
        )


def test_read_and_harmless_settings_are_deepspeeds():
    fields = {key.field for key in deepspeed_keys("zero_optimization").values()}
    assert fields >= _ZERO_READ | _ZERO_HARMLESS
    assert not _ZERO_READ & _ZERO_HARMLESS
    assert not _HARMLESS_SECTIONS & _MEMORY_SECTIONS


@pytest.mark.stack
def test_every_section_named_is_one_the_pinned_deepspeed_reads():
    import deepspeed

    root = Path(deepspeed.__file__).parent
    source = "\n".join(path.read_text(encoding="utf-8") for path in root.glob("**/*.py") if "/ops/" not in str(path))
    spellings = ('"{}"', "'{}'", "\n    {}:")  # a constant, or a field of a pydantic model

    def is_read(name: str) -> bool:
        return any(spelling.format(name) in source for spelling in spellings)

    assert [name for name in sorted(_HARMLESS_SECTIONS | _MEMORY_SECTIONS) if not is_read(name)] == []


@pytest.mark.stack
@pytest.mark.parametrize(
    "section",
    [
        {"stage": 3},
        {"stage": 2},
        {"stage": 0},
        {"stage": 1, "overlap_comm": True},
        *(EXAMPLES[name]["zero_optimization"] for name in EXAMPLES),
        {"stage": 3, "reduce_bucket_size": 1e7, "stage3_max_live_parameters": "auto", "sub_group_size": 5e8},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}},
    ],
)
def test_typed_values_are_those_of_deepspeeds_own_model(write, section):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    ours, theirs = zero(write(deepspeed={"zero_optimization": section})), DeepSpeedZeroConfig(**section)
    assert (ours.stage, ours.overlap_comm) == (theirs.stage, theirs.overlap_comm)
    for name in (
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "sub_group_size",
        "round_robin_gradients",
    ):
        assert getattr(ours, name) in ("auto", getattr(theirs, name))
    assert ours.gather_16bit_weights_on_save == theirs.gather_16bit_weights_on_model_save
    assert ours.offload_param == (theirs.offload_param.device if theirs.offload_param else "none")


@pytest.mark.stack
@pytest.mark.parametrize(
    "section",
    [
        {"stage": 2, "overlap_com": True},
        {"stage": 7},
        {"stage": 3, "reduce_bucket_size": 1.5},
        {"stage": 3, "offload_param": {"device": "gpu"}},
        {"stage": 2, "offload_optimizer": {"ratio": 0.5}},
    ],
)
def test_what_is_refused_here_deepspeed_refuses(write, section):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with pytest.raises((ValueError, AssertionError)):
        DeepSpeedZeroConfig(**section)
    assert problems(write(deepspeed={"zero_optimization": section}))
