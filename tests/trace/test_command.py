"""`predict --trace` as a script runs it: a process of its own, with all that the libraries of the stack print."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.stack

RECIPE = """\
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
stage: dpo
do_train: true
finetuning_type: full
deepspeed: ds_z3_config.json
bf16: true
per_device_train_batch_size: 1
output_dir: out
template: qwen
dataset: pairs
"""


def test_stdout_is_the_json_alone_and_the_timeline_is_drawn(tmp_path):
    """DeepSpeed prints a line at every stage of its start, the fake process group another."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    command = [
        sys.executable, "-c", "from dpofit.cli.app import main; main()", "predict", "mine.yaml", "--gpu", "a100-80g",
        "--nodes", "1", "--prompt", "200", "--response", "56", "--trace", "--timeline", "step.html", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    traced = json.loads(done.stdout)["trace"]
    assert traced["phases"]["reference_forward"]["allocated_bytes"] > 2 * 256 * 151936 * 20  # 20 bytes a logit
    assert "reference_forward" in (tmp_path / "step.html").read_text()
