"""The environment a recipe runs in, by precedence, and what it says about the allocator."""

from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe.check import check_recipe
from dpofit.recipe.load import load_recipe

ON = "expandable_segments:True"
OFF = "expandable_segments:False"


def load(path, environment):
    return load_recipe(path, (), environment).recipe


@pytest.fixture
def run_folder(write, tmp_path):
    def make(dpofit_yaml: str) -> str:
        (tmp_path / "dpofit.yaml").write_text(dpofit_yaml)
        return write()

    return make


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),  # the launcher turns it on
        ({"OPTIM_TORCH": "0"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON}, True),
        ({"PYTORCH_ALLOC_CONF": ON, "OPTIM_TORCH": "0"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": OFF}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:128,{ON}"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "OPTIM_TORCH": "0"}, False),
        # torch reads the newer name first
        ({"PYTORCH_ALLOC_CONF": OFF, "PYTORCH_CUDA_ALLOC_CONF": ON}, False),
    ],
)
def test_expandable_segments_is_what_the_environment_says(write, environment, expected):
    assert load(write(), environment).expandable_segments is expected


def test_the_process_wins_over_dpofit_yaml(run_folder):
    path = run_folder(f"env:\n  PYTORCH_ALLOC_CONF: {OFF}\n  NCCL_DEBUG: WARN\n")
    assert load(path, {}).expandable_segments is False
    recipe = load(path, {"PYTORCH_CUDA_ALLOC_CONF": ON})
    assert recipe.environment == {"PYTORCH_CUDA_ALLOC_CONF": ON, "NCCL_DEBUG": "WARN"}
    assert recipe.expandable_segments is True


def test_only_variables_that_matter_to_a_run_are_kept(write):
    kept = load(write(), {"HOME": "/root", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HF_TOKEN": "x"}).environment
    assert kept == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_dpofit_yaml_may_set_only_allowed_variables_and_all_problems_are_told(run_folder):
    path = run_folder("env:\n  LD_PRELOAD: x.so\n  PATH: /tmp\n  NCCL_DEBUG: [a]\n")
    where = Path(path).with_name("dpofit.yaml")
    with pytest.raises(BadInput) as bad:
        load(path, {})
    assert [str(problem) for problem in bad.value.problems] == [
        f"{where}:1: env.LD_PRELOAD: may not be set here. Export it in the shell.",
        f"{where}:1: env.PATH: may not be set here. Export it in the shell.",
        f"{where}:1: env.NCCL_DEBUG: has no single value. Give text or a number.",
    ]


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("expandable_segments:True,max_split_size_mb:128", []),
        ("roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True", []),
        ("expandable_segment:True", ["expandable_segment:True"]),
        ("expandable_segments:true,garbage", ["expandable_segments:true", "garbage"]),
        ("expandable_segments=True", ["expandable_segments=True"]),
    ],
)
def test_allocator_settings_that_torch_would_refuse_are_named(write, setting, refused):
    found = check_recipe(write(), (), {"PYTORCH_CUDA_ALLOC_CONF": setting})
    said = [finding.title for finding in found if finding.id == "config.allocator-setting"]
    assert said == [f"PYTORCH_CUDA_ALLOC_CONF says {text!r}" for text in refused]
