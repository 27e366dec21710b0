"""`dpofit doctor` as a user runs it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
LINE = {
    "type": "object",
    "required": ["where", "text"],
    "properties": {"where": {"type": "string", "pattern": r":\d+$"}, "text": {"type": "string"}},
}
LINES = {"type": "array", "items": LINE}
SCHEMA = {
    "type": "object",
    "required": ["schema", "findings", "followed", "telling_lines", "logs"],
    "properties": {
        "schema": {"const": "dpofit.doctor/1"},
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "severity", "title", "evidence", "cause", "fix"],
                "properties": {
                    "id": {"pattern": r"^(memory|save|launch|data|config)\.[a-z0-9-]+$"},
                    "severity": {"enum": ["error", "warning", "info"]},
                    "evidence": {**LINES, "minItems": 1},
                },
            },
        },
        "followed": LINES,
        "telling_lines": LINES,
    },
}


def doctor(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from dpofit.cli.app import main; main()", "doctor", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)


def document(*arguments: str, stdin: bytes = b"") -> tuple[int, dict[str, Any]]:
    done = doctor("--json", *arguments, stdin=stdin)
    assert done.stderr == b""
    read = json.loads(done.stdout)
    jsonschema.validate(read, SCHEMA)
    return done.returncode, read


def test_a_known_failure_exits_1() -> None:
    code, read = document(str(LOGS / "disk_full.log"))
    assert (code, read["findings"][0]["id"]) == (1, "save.disk-full")
    assert read["telling_lines"] == []


def test_an_unknown_log_exits_0_with_its_telling_lines(tmp_path: Path) -> None:
    log = tmp_path / "with space.log"
    log.write_text("start\nsomething.Strange: engine failed at rank 3\nend\n")
    code, read = document(str(log))
    assert (code, read["findings"]) == (0, [])
    assert read["telling_lines"][0] == {"where": f"{log}:2", "text": "something.Strange: engine failed at rank 3"}


def test_a_warning_exits_0() -> None:
    code, read = document(str(LOGS / "config_fa2_missing.log"))
    assert (code, [finding["severity"] for finding in read["findings"]]) == (0, ["warning"])


def test_a_missing_log_exits_2_in_one_line() -> None:
    done = doctor("gone.log")
    assert done.returncode == 2
    assert done.stderr.decode().startswith("error: gone.log: cannot read this log: No such file")
    assert b"Traceback" not in done.stderr


def test_gzip_on_standard_input() -> None:
    code, read = document("-", stdin=gzip.compress((LOGS / "sighup_nohup.log").read_bytes()))
    assert (code, read["findings"][0]["id"]) == (1, "launch.sighup")
    assert read["findings"][0]["evidence"][0]["where"].startswith("-:")


def test_the_text_fits_100_columns_and_names_line_and_fix() -> None:
    out = doctor(str(LOGS / "sigkill_step.log")).stdout.decode()
    assert max(map(len, out.splitlines())) <= 100
    for part in ("error A rank was killed with SIGKILL", "memory.killed-9", "sigkill_step.log:", "why:", "fix:"):
        assert part in out


def test_help_has_examples() -> None:
    out = doctor("--help").stdout.decode()
    assert "Examples:" in out and "dpofit doctor node*.log.gz" in out


def test_the_recipe_names_the_tensor_and_the_prediction(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "[INFO] Process rank: 0, world size: 72, device: cuda:0, distributed training: True\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.76 GiB. GPU 6 has a total capacity of "
        "79.33 GiB\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: Qwen/Qwen2-72B\nstage: dpo\ndo_train: true\nfinetuning_type: full\ntemplate: qwen\n"
        "dataset: pairs\ncutoff_len: 11008\nper_device_train_batch_size: 1\nbf16: true\noutput_dir: out\n"
        "deepspeed: examples/deepspeed/ds_z3_config.json\nenable_liger_kernel: true\nuse_unsloth_gc: true\n"
    )
    code, read = document(str(log), "--recipe", str(recipe))
    cause = read["findings"][0]["cause"]
    assert code == 1
    assert "In this model 8.76 GiB = fp32 logits of 2 x 7,732 x 152,064 x 4 bytes." in cause
    assert "on 79.33 GiB (9 x 8 GPUs" in cause


def test_a_missing_recipe_exits_2() -> None:
    assert doctor(str(LOGS / "disk_full.log"), "--recipe", "no-such-recipe").returncode == 2
