"""measure_gpu without a GPU: every job is one dpofit plans; jobs run for real on the CPU; none takes the rest along."""

import importlib.util
import json
from dataclasses import replace

import pytest
from measure_gpu import snapshot
from measure_gpu.jobs import JOBS, GpuJob, planned
from measure_gpu.results import CardRead, read_results
from measure_gpu.runner import run_jobs

from dpofit.cli.app import main as dpofit
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.allocator import replay
from dpofit.memory.predict import predict

CONFIG = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path) -> GpuJob:
    """One layer of a two-layer model, two steps."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return GpuJob("tiny", str(tmp_path / "model"), 1, (48, 64), {"finetuning_type": "lora", "lora_target": "q_proj"})


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_job_is_predicted_to_run_on_an_h200(job) -> None:
    assert predict(*planned(job, find_gpu("h200-141g"))).gpu_verdict != "oom"


def test_jobs_have_names_of_their_own_and_the_models_they_name_hold_the_rows() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert max(job.rows) <= job.config["max_position_embeddings"]


def test_a_result_is_predicted_for_the_batches_and_versions_that_ran() -> None:
    job = JOBS[0]
    longest, mix = planned(job, find_gpu("h200-141g"), rows=[4096, 8192, 4096])
    assert (longest.lengths.row_tokens, [lengths.row_tokens for lengths in mix]) == (8192, [4096])


def test_a_card_read_by_nvml_has_its_profile_and_its_own_capacity() -> None:
    gpu = CardRead("NVIDIA H200", 150_000_000_000, 0, "580.1").gpu
    assert (gpu.name, gpu.capacity_bytes) == ("h200-141g", 150_000_000_000)


def test_torchs_record_becomes_the_allocators_events() -> None:
    # Synthetic, in the form of torch.cuda.memory._snapshot()["device_traces"][0].
    trace = [
        {"action": "free_completed", "addr": 7, "size": 512, "stream": 0},  # began before the record
        {"action": "segment_alloc", "addr": 0, "size": 20 << 20, "stream": 0},
        {"action": "alloc", "addr": 0, "size": 3 << 20, "stream": 0},
        {"action": "alloc", "addr": 3 << 20, "size": 4 << 20, "stream": 0},
        {"action": "free_requested", "addr": 0, "size": 3 << 20, "stream": 0},
        {"action": "free_completed", "addr": 0, "size": 3 << 20, "stream": 0},
        {"action": "alloc", "addr": 0, "size": 2 << 20, "stream": 0},
    ]
    record = snapshot.Record(tuple(snapshot.requests(trace)), 20 << 20)
    events = list(snapshot.allocator_events(record))
    assert events == [("1", 3 << 20, "0"), ("2", 4 << 20, "0"), ("1", -(3 << 20), "0"), ("4", 2 << 20, "0")]
    assert replay(events, expandable=False).peak_reserved_bytes == record.reserved_peak_bytes


@pytest.mark.stack
def test_on_the_cpu_jobs_run_and_one_that_dies_or_hangs_stops_no_other(tiny, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    explodes = replace(tiny, name="explodes", settings={**tiny.settings, "stage": "nonsense"})
    hangs = replace(tiny, name="hangs", timeout_s=0)
    absent = replace(tiny, name="absent", needs=("no_such_module",))
    results = tmp_path / "results"
    assert run_jobs([explodes, hangs, absent, tiny], results, tmp_path / "work space", 600)
    found = {result.name: result for result in read_results(results)}
    assert {name: result.outcome for name, result in found.items()} == {
        "explodes": "failed", "hangs": "timeout", "absent": "skipped", "tiny": "ok",
    }  # fmt: skip
    assert "nonsense" in found["explodes"].error and "no_such_module" in found["absent"].error
    ran = found["tiny"]
    assert [rows for rows, tokens in ran.batches] == [2, 2]
    assert [tokens for rows, tokens in ran.batches] == [48, 64]
    assert len(ran.step_seconds) == 2 and ran.host_rss_peak_bytes > 2**27
    assert ran.versions["llamafactory"] == importlib.metadata.version("llamafactory")
    cuda = (ran.card, ran.allocated_peak_bytes, ran.reserved_peak_bytes, ran.nvml_peak_bytes, ran.context_bytes)
    assert cuda == (None,) * 5 and ran.host_pinned_peak_bytes is None
    assert json.loads((results / "tiny.cpu.json").read_text())["allocated_peak_bytes"] is None

    # Its log is one of a real run: `dpofit calibrate` says what it can't calibrate by it.
    work = tmp_path / "work space" / "tiny"
    with pytest.raises(SystemExit) as ended:
        model = f"model_name_or_path={tiny.model}"  # the job's own copy is gone with its weights
        dpofit(["calibrate", str(work / "output"), model, "--recipe", str(work / "recipe.json"), "--gpu", "h200-141g"])
    printed = capsys.readouterr().out
    assert ended.value.code == 1 and "nothing to calibrate with" in printed
    assert "2 steps of 1 rank read" in printed and "no reading from a GPU in the log" in printed

    assert run_jobs([absent, tiny], results, tmp_path / "work space", 600)  # resumed: nothing is run again
    assert capsys.readouterr().out.count("measured already") == 2


def test_jobs_for_which_no_time_is_left_are_named(tiny, tmp_path, capsys) -> None:
    assert not run_jobs([tiny], tmp_path / "results", tmp_path / "work", budget_s=1)
    assert capsys.readouterr().out == "out of time; left for another run: tiny\n"
