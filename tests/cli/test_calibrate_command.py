"""calibrate: readings beside the prediction, constants of the cluster, and what later predictions make of them.

The readings are synthetic, in the form train/memory_log.py writes (checked against it where the stack is installed);
no run of ours has been on a GPU yet.
"""

from __future__ import annotations

import json

import pytest

from dpofit.units import GIB

MINE = """\
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
template: qwen
dataset: dpo_en_demo
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
output_dir: output
"""


def reading(step: int, rank: int = 0, **changes: object) -> dict:
    """A reading of 20 GiB allocated, 22 reserved and 23.5 by NVML."""
    return {
        "schema": "dpofit.memory/1", "time": 1.0, "step": step, "rank": rank, "local_rank": rank, "loss": 0.69,
        "gpu_allocated_peak_bytes": 20 * GIB, "gpu_reserved_peak_bytes": 22 * GIB,
        "gpu_nvml_used_bytes": int(23.5 * GIB), "host_rss_bytes": 3 * GIB, "cgroup_used_bytes": None,
        "cgroup_limit_bytes": None, **changes,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run folder of one rank; `run(readings)` writes its log."""
    (tmp_path / "recipe.yaml").write_text(MINE)

    def write(readings, node: int = 0):
        log = tmp_path / "output" / "dpofit" / f"memory.{node}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(json.dumps(line) + "\n" for line in readings))
        return tmp_path

    return write


def predicted(dpofit, folder, *more):
    return dpofit("predict", folder / "recipe.yaml", "--gpu", "a100-80g", "--gpus-per-node", 1, "--json", *more).json


def test_the_highest_readings_stand_beside_the_prediction(dpofit, run) -> None:
    folder = run([reading(1), reading(2, gpu_allocated_peak_bytes=21 * GIB), reading(3)])
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g", "--json")
    assert ran.exit_code == 0
    before = predicted(dpofit, folder)["gpu"]
    rows = {row["what"]: row for row in ran.json["compared"]}
    assert rows["allocated"]["measured_bytes"] == 21 * GIB
    assert rows["allocated"]["predicted_bytes"] == before["allocated_bytes"]
    assert rows["allocated"]["error"] == pytest.approx(21 * GIB / before["allocated_bytes"] - 1)
    assert rows["NVML"]["measured_bytes"] == int(23.5 * GIB)
    assert rows["context, communicators"]["measured_bytes"] == int(1.5 * GIB)
    assert rows["host, a node's processes"]["measured_bytes"] == 3 * GIB


def test_a_later_prediction_uses_the_measured_context_and_the_wider_interval_and_says_so(dpofit, run) -> None:
    folder = run([reading(1)])
    before = predicted(dpofit, folder)
    high = before["gpu"]["reserved_bytes"] * 3 // 2  # as if fragmentation had taken half as much again
    run([reading(1, gpu_reserved_peak_bytes=high, gpu_nvml_used_bytes=high + 3 * GIB // 2)])
    assert dpofit("calibrate", folder, "--gpu", "a100-80g").exit_code == 0
    file = folder / "calibration.json"
    after = predicted(dpofit, folder, "--calibration", file)
    assert after["gpu"]["context_bytes"] == 3 * GIB // 2
    assert after["gpu"]["peak_bytes"] == before["gpu"]["reserved_bytes"] + 3 * GIB // 2
    assert after["gpu"]["high_bytes"] == pytest.approx(high + 3 * GIB // 2, abs=1024)
    note = next(note for note in after["notes"] if note["id"] == "calibrated")
    assert str(folder) in note["text"] and "context 1.50 to 1.50 GiB" in note["text"] and "+50.0%" in note["text"]


def test_what_is_close_to_the_prediction_narrows_nothing_but_the_context(dpofit, run) -> None:
    folder = run([reading(1)])
    before = predicted(dpofit, folder)["gpu"]
    run([reading(1, gpu_allocated_peak_bytes=before["allocated_bytes"],
                 gpu_reserved_peak_bytes=before["reserved_bytes"],
                 gpu_nvml_used_bytes=before["reserved_bytes"] + GIB)])  # fmt: skip
    dpofit("calibrate", folder, "--gpu", "a100-80g")
    after = predicted(dpofit, folder, "--calibration", folder / "calibration.json")["gpu"]
    context = before["context_bytes"]
    assert after["high_bytes"] - GIB == before["high_bytes"] - context
    assert after["low_bytes"] == before["allocated_bytes"] + GIB


def test_a_correction_beyond_a_fifth_is_warned_of_and_what_would_mend_it(dpofit, run) -> None:
    folder = run([reading(1, gpu_allocated_peak_bytes=10 * GIB, gpu_reserved_peak_bytes=11 * GIB)])
    job = ["calibrate", folder, "--gpu", "a100-80g", "--force"]
    (finding,) = dpofit(*job, "--json").json["findings"]
    assert (finding["id"], finding["severity"]) == ("memory.calibration-far-off", "warning")
    assert {seen["where"] for seen in finding["evidence"]} == {"allocated", "reserved"}
    assert "--lengths" in finding["fix"]
    assert "memory.calibration-far-off" in dpofit(*job).out
    (given,) = dpofit(*job, "--prompt", 2000, "--response", 48, "--json").json["findings"]
    assert "--lengths" not in given["fix"]


def test_a_run_near_its_prediction_is_not_warned_of(dpofit, run) -> None:
    near = predicted(dpofit, run([reading(1)]))["gpu"]
    read = reading(1, gpu_allocated_peak_bytes=int(0.9 * near["allocated_bytes"]),
                   gpu_reserved_peak_bytes=int(0.9 * near["reserved_bytes"]))  # fmt: skip
    assert dpofit("calibrate", run([read]), "--gpu", "a100-80g", "--json").json["findings"] == []


def test_limits_compare_and_advise_take_a_calibration_and_say_so(dpofit, run) -> None:
    folder = run([reading(1)])
    dpofit("calibrate", folder, "--gpu", "a100-80g")
    job = (folder / "recipe.yaml", "--gpu", "a100-80g", "--gpus-per-node", 1)
    plain = dpofit("limits", *job, "--json").json["rows"][0]["longest_prompt_tokens"]
    for command in ("limits", "compare", "advise"):
        ran = dpofit(command, *job, "--calibration", folder / "calibration.json", "--json")
        assert [note["id"] for note in ran.json["notes"]] == ["calibrated"], command
        if command == "limits":  # 1.5 GiB of context instead of 1.9 leave room for more
            assert ran.json["rows"][0]["longest_prompt_tokens"] > plain
        assert "calibrated: By" in dpofit(command, *job, "--calibration", folder / "calibration.json").out
        assert dpofit(command, *job, "--json").json["notes"] == []


def test_several_ranks_measure_communicators_too_which_one_rank_has_not(dpofit, run) -> None:
    ranks = [reading(1, rank, gpu_nvml_used_bytes=(24 * GIB + rank * GIB // 4)) for rank in range(2)]
    folder = run(ranks)
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g", "--json")
    assert ran.json["world_size"] == 2
    assert ran.json["calibration"]["context"] == {"low_bytes": 2 * GIB, "high_bytes": 2 * GIB + GIB // 4}
    one = predicted(dpofit, folder, "--calibration", folder / "calibration.json")["gpu"]
    assert one["context_bytes"] == predicted(dpofit, folder)["gpu"]["context_bytes"]
    two = dpofit("predict", folder / "recipe.yaml", "--gpu", "a100-80g", "--gpus-per-node", 2, "--json",
                 "--calibration", folder / "calibration.json").json["gpu"]  # fmt: skip
    assert two["context_bytes"] + two["communicators_bytes"] == 2 * GIB + GIB // 4


def test_without_a_gpu_reading_it_says_what_cannot_be_calibrated_and_writes_nothing(dpofit, run) -> None:
    none = dict.fromkeys(("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "gpu_nvml_used_bytes"))
    folder = run([reading(1, **none)])
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g", "--json")
    assert ran.exit_code == 1 and ran.json["written"] is None and ran.json["calibration"] is None
    why = {row["what"]: row["why"] for row in ran.json["compared"]}
    assert why["allocated"] == why["reserved"] == why["NVML"] == "no reading from a GPU in the log"
    assert why["host, a node's processes"] is None
    assert not (folder / "calibration.json").exists()
    assert "nothing to calibrate with" in dpofit("calibrate", folder, "--gpu", "a100-80g").out


def test_llamafactorys_record_vram_calibrates_what_it_shows(dpofit, run, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text(MINE)
    (tmp_path / "output").mkdir()
    log = [{"current_steps": 1, "loss": 0.69, "vram_allocated": 19.5, "vram_reserved": 21.25}, {"eval_loss": 0.7}]
    (tmp_path / "output" / "trainer_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    ran = dpofit("calibrate", tmp_path, "--gpu", "a100-80g", "--gpus-per-node", 1, "--json")
    assert ran.exit_code == 0
    rows = {row["what"]: row for row in ran.json["compared"]}
    assert rows["allocated"]["measured_bytes"] == int(19.5 * GIB)
    assert rows["reserved"]["measured_bytes"] == int(21.25 * GIB)
    assert rows["NVML"]["measured_bytes"] is None and ran.json["calibration"]["context"] is None


def test_of_a_log_that_went_on_over_two_runs_only_the_last_counts(dpofit, run) -> None:
    folder = run([reading(1, gpu_allocated_peak_bytes=70 * GIB), reading(2), reading(1), reading(2)])
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g", "--json")
    assert ran.json["compared"][0]["measured_bytes"] == 20 * GIB


def test_lines_that_are_no_readings_are_named_all_at_once(dpofit, run) -> None:
    folder = run([reading(1), {"step": "two"}, reading(2, gpu_nvml_used_bytes=-1)])
    log = folder / "output" / "dpofit" / "memory.0.jsonl"
    log.write_text(log.read_text() + "[1, 2\n")
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g")
    assert ran.exit_code == 2
    assert [line.partition(": ")[2].split(": ")[0] for line in ran.err.splitlines()] == [
        f"{log}:2", f"{log}:3", f"{log}:4",
    ]  # fmt: skip


def test_a_folder_without_logs_or_recipe_is_one_clear_error(dpofit, run, tmp_path) -> None:
    ran = dpofit("calibrate", tmp_path / "nowhere")
    assert ran.exit_code == 2 and "has no recipe.yaml" in ran.err
    (tmp_path / "recipe.yaml").write_text(MINE)
    ran = dpofit("calibrate", tmp_path)
    assert ran.exit_code == 2 and "RECORD_VRAM" in ran.err


def test_a_file_that_is_there_is_not_overwritten_without_force(dpofit, run) -> None:
    folder = run([reading(1)])
    (folder / "calibration.json").write_text("mine")
    ran = dpofit("calibrate", folder, "--gpu", "a100-80g")
    assert ran.exit_code == 2 and (folder / "calibration.json").read_text() == "mine"
    assert dpofit("calibrate", folder, "--gpu", "a100-80g", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"), ("[]", "is not a dpofit.calibration/1"),
        ('{"schema": "dpofit.calibration/1", "run": "r", "gpu": "a100-80g", "world_size": 0, "reserved_error": "much"}',
         "has no usable world_size, reserved_error"),
        ('{"schema": "dpofit.calibration/1", "run": "r", "gpu": "h100-80g", "world_size": 1}',
         "was measured on h100-80g, this job is on a100-80g"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_calibration_of_this_card_is_refused(dpofit, run, text, says) -> None:
    folder = run([reading(1)])
    (folder / "other.json").write_text(text)
    ran = dpofit("predict", folder / "recipe.yaml", "--gpu", "a100-80g", "--calibration", folder / "other.json")
    assert ran.exit_code == 2 and says in ran.err and len(ran.err.splitlines()) == 1


@pytest.mark.stack
def test_the_readings_here_have_the_fields_that_training_writes() -> None:
    from dataclasses import fields

    from dpofit.train.memory_log import SCHEMA, Reading

    assert list(reading(1)) == [field.name for field in fields(Reading)]
    assert reading(1)["schema"] == SCHEMA


def test_a_launch_forecasts_with_a_calibration_and_refuses_a_bad_one(dpofit, run) -> None:
    folder = run([reading(1, rank) for rank in range(2)])
    dpofit("calibrate", folder, "--gpu", "a100-80g")
    ran = dpofit("launch", folder, "--dry-run", "--calibration", folder / "calibration.json")
    assert ran.exit_code == 0 and "calibrated: By" in ran.out
    (folder / "calibration.json").write_text("{}")
    ran = dpofit("launch", folder, "--dry-run", "--calibration", folder / "calibration.json")
    assert ran.exit_code == 2 and "is not a dpofit.calibration/1" in ran.err
