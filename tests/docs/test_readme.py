"""README says what dpofit says, and names only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_tables_are_what_dpofit_says_today():
    command = [sys.executable, ROOT / "scripts" / "render_readme.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_link_and_script_named_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    scripts = re.findall(r"bash (scripts/\S+\.sh)", README)
    assert len(links) > 5 and len(scripts) > 2
    assert [path for path in links + scripts if not (ROOT / path).exists()] == []


def test_every_command_shown_is_a_command():
    from dpofit.cli.app import COMMANDS

    shown = set(re.findall(r"^dpofit (\w+)", README, re.MULTILINE))
    assert len(shown) >= 5
    assert shown <= set(COMMANDS)


@pytest.mark.parametrize(
    "named, overrides",
    [
        ("ppo", ["stage=ppo", "reward_model=x"]),
        ("HQQ", ["quantization_bit=4", "quantization_method=hqq"]),
        ("EETQ", ["quantization_bit=8", "quantization_method=eetq"]),
        ("BAdam with DeepSpeed", ["use_badam=true", "finetuning_type=full", "deepspeed=ds_z3_config.json"]),
        ("unsloth's compiled layers", ["use_unsloth=true"]),
    ],
)
def test_what_is_said_to_be_refused_is(named: str, overrides: list[str]) -> None:
    from dpofit.memory.scope import check_scope
    from dpofit.plan import JobFlags, plan_job

    [sentence] = re.findall(r"refused by name:([^.]+)\.", README)
    assert named in sentence
    with pytest.raises(BadInput, match="not modelled yet"):
        job = plan_job("qwen2.5-7b-dpo/lora-1gpu", overrides, JobFlags()).job
        check_scope(job.recipe, job.model)


KEYS = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "not-modelled.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_that_a_page_gives_reasons_for_is_still_refused(key: str) -> None:
    from dpofit.memory.predict import predict
    from dpofit.plan import JobFlags, plan_job

    name, _, value = key.partition("=")
    beside = {"quantization_method": "quantization_bit=8", "badam_mode": "use_badam=true"}
    overrides = [f"{name}={value or 'true'}", *([beside[name]] if value else [])]
    tuning = "full" if name == "badam_mode" else "lora"
    with pytest.raises(BadInput) as refused:
        predict(plan_job("qwen2.5-7b-dpo/lora-1gpu", [*overrides, f"finetuning_type={tuning}"], JobFlags()).job)
    named = "quantization_bit" if name == "quantization_method" else name
    assert [problem.key for problem in refused.value.problems] == [named]


@pytest.mark.parametrize("override", ["use_dora=true", "use_galore=true", "use_muon=true", "use_adam_mini=true"])
def test_what_is_modelled_is_not_said_to_be_refused(override: str) -> None:
    from dpofit.memory.predict import predict
    from dpofit.plan import JobFlags, plan_job

    full = [] if override == "use_dora=true" else ["finetuning_type=full", "optim=adamw_torch"]
    assert predict(plan_job("qwen2.5-7b-dpo/lora-1gpu", [override, *full], JobFlags()).job).verdict
    assert override.removesuffix("=true").removeprefix("use_").lower() not in README.lower()
