"""Logs of failures that were really caused (fixtures/logs/cause_failures.py): the first finding and its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doctor.conftest import read

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
# log: the first finding, a text that stands in its first line of evidence
EXPECTED = {
    "config_dora_full": ("config.method", "`use_dora` is only valid for LoRA training."),
    "config_fa2_missing": ("config.flash-attn-fallback", "FlashAttention-2 is not installed"),
    "config_galore_zero3": ("config.galore-deepspeed", "incompatible with DeepSpeed"),
    "config_label_smoothing": ("config.label-smoothing", "only valid for sigmoid"),
    "config_load_best": ("config.load-best-strategy", "requires the save and eval strategy to match"),
    "config_lora_target": ("config.peft-target", "nope_proj"),
    "config_no_deepspeed_file": ("config.deepspeed-file", "Received: ds_z9.json"),
    "config_no_model": ("config.model-not-found", "outgoing traffic has been disabled"),
    "config_pure_bf16_zero3": ("config.pure-bf16", "`pure_bf16`"),
    "config_quant_full": ("config.method", "Quantization is only compatible"),
    "config_unknown_key": ("config.unknown-key", "['learning_rat']"),
    "config_unsloth_zero3": ("config.unsloth-zero3", "Unsloth is incompatible"),
    "ctrl_c": ("launch.interrupted", "2 death signal"),
    "data_bad_roles": ("data.roles", "Invalid role tag"),
    "data_broken_json": ("data.broken-file", "JSON parse error"),
    "data_empty_pairs": ("data.no-valid-samples", "Cannot find valid samples"),
    "data_missing_columns": ("data.missing-column", "KeyError: 'chosen'"),
    "data_no_file": ("data.no-file", "data/gone.json"),
    "data_no_info": ("data.no-info", "nowhere/dataset_info.json"),
    "data_undefined": ("data.undefined", "not_there"),
    "data_unranked": ("data.unranked", "not applicable in the current training stage"),
    "disk_full": ("save.disk-full", "No space left on device"),
    "extension_build": ("config.extension-build", "Error building extension"),
    "host_memory_limit": ("memory.host-allocation", "MemoryError"),
    "loss_nan": ("data.loss-nan", "nan"),
    "loss_stuck": ("data.loss-stuck", "0.6931"),
    "model_missing_shard": ("save.missing-shard", "model-00002-of-"),
    "model_size_mismatch": ("save.size-mismatch", "ignore_mismatched_sizes"),
    "model_torn_weights": ("save.torn-file", "Error while deserializing"),
    "no_torchrun": ("launch.no-launcher", "FORCE_TORCHRUN=1"),
    "port_in_use": ("launch.port-in-use", "EADDRINUSE"),
    "rank_stops": ("launch.gloo-timeout", "imed out"),
    "read_only": ("save.permission", "Read-only file system"),
    "restarts": ("data.unranked", "not applicable in the current training stage"),
    "resume_missing": ("save.no-checkpoint", "out/checkpoint-999"),
    "resume_other_world": ("save.resume-world-size", "The checkpoint being loaded used a DP world size of 2"),
    "resume_torn": ("save.torn-file", "failed reading zip archive"),
    "segfault": ("launch.crashed", "exitcode: -11"),
    "sighup_nohup": ("launch.sighup", "1 death signal"),
    "sigkill_step": ("memory.killed-9", "exitcode: -9"),
    "sigterm": ("launch.sigterm", "15 death signal"),
    "template_unknown": ("data.template", "qwen99"),
}
WELL = ("ok", "ok_zero3", "master_unreachable")  # the last one waits for a node without saying so


@pytest.mark.parametrize(("name", "wanted"), EXPECTED.items())
def test_first_finding(name: str, wanted: tuple[str, str]) -> None:
    finding = read((LOGS / f"{name}.log").read_bytes()).findings[0]
    assert finding.id == wanted[0]
    assert wanted[1] in finding.evidence[0].text


@pytest.mark.parametrize("name", WELL)
def test_no_finding(name: str) -> None:
    assert read((LOGS / f"{name}.log").read_bytes()).findings == ()


def test_every_log_is_in_the_table() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*EXPECTED, *WELL}


def test_logs_name_no_machine() -> None:
    for path in LOGS.glob("*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert re.search(r"/(?:tmp|root)/", text) is None, path


def test_the_line_is_where_grep_finds_it() -> None:
    raw = (LOGS / "disk_full.log").read_bytes()
    line = next(
        n for n, text in enumerate(raw.split(b"\n"), 1) if b"No space left on device" in text and b"raise" not in text
    )
    assert read(raw).findings[0].evidence[0].where == f"node-0.log:{line}"
