"""Which clusters could have produced a documented limit: what `could` means, and the page made from it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, tiny, zero

from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.job import Job, Lengths
from dpofit.memory.predict import predict
from dpofit.memory.reproduce import NOTICEABLY_MORE, SIZES, UNITS, DocumentedLimit, Reproduction, reproduce
from dpofit.report.reproduce import sizes

ROOT = Path(__file__).resolve().parents[2]
TOKENS = UNITS[0]


def limit(prompt: int, open_ended: bool = False, finetuning: str = "full", **recipe: object) -> DocumentedLimit:
    planned = job(tiny(layers=2, vocab=100_000, hidden=512), zero=zero(3), finetuning=finetuning, **recipe)  # type: ignore[arg-type]
    return DocumentedLimit("test", finetuning, planned, prompt, 256, open_ended)


def in_tokens(found: list[Reproduction]) -> list[Reproduction]:
    return [one for one in found if one.unit is TOKENS]


def at(documented: DocumentedLimit, gpu: Gpu, gpus: int, prompt: int) -> Job:
    lengths = Lengths(prompt, documented.response, documented.response, documented.job.lengths.padded)
    return replace(documented.job, cluster=Cluster(gpu, gpus // 8, 8), lengths=lengths)


@pytest.mark.parametrize("gib", [8, 11, 14, 17, 20])
def test_could_is_not_oom_at_the_limit_and_not_certain_to_fit_a_quarter_longer(gib):
    documented, gpu = limit(2048), Gpu("card", gib * 2**30, "test", 2**29)
    for one in in_tokens(reproduce([documented], [gpu])):
        here = predict(at(documented, gpu, one.gpus, 2048)).verdict
        longer = predict(at(documented, gpu, one.gpus, round(2048 * NOTICEABLY_MORE / 8) * 8)).verdict
        expected = "too-long" if here == "oom" else "room-left" if longer == "fits" else "could"
        assert one.outcomes[0].outcome == expected


def test_the_cards_above_show_every_outcome():
    cards = [Gpu(f"{gib}", gib * 2**30, "test", 2**29) for gib in (8, 11, 14, 17, 20)]
    outcomes = {one.outcomes[0].outcome for one in in_tokens(reproduce([limit(2048)], cards))}
    assert outcomes == {"too-long", "could", "room-left"}


def test_a_limit_that_its_source_calls_open_never_has_room_left():
    big = Gpu("card", 500 * 2**30, "test", 2**29)
    assert {one.outcomes[0].outcome for one in reproduce([limit(2048, open_ended=True)], [big])} == {"could"}
    assert {one.outcomes[0].outcome for one in reproduce([limit(2048)], [big])} == {"room-left"}


def test_every_size_unit_and_tuning_is_tried_once():
    found = reproduce([limit(256), limit(256, finetuning="lora")], [find_gpu("a100-80g"), find_gpu("h20-96g")])
    tried = [(one.finetuning, one.unit.language, one.gpu.name, one.gpus) for one in found]
    assert len(set(tried)) == len(tried) == 2 * 3 * 2 * len(SIZES)


def test_characters_are_turned_into_tokens_by_qwens_rule_of_thumb():
    """8,192 characters: 8,192 / 1.65 = 4,965 tokens of Chinese, 8,192 / 3.5 = 2,341 of English, in steps of 8."""
    assert [unit.tokens(8192) for unit in UNITS] == [8192, 4968, 2344]


def test_full_fine_tuning_in_tokens_is_not_what_80_gb_cards_did():
    """8,192 + 1,024 tokens take five fp32 tensors of logits, 2 x 9,216 x 152,064 x 4 bytes each, 80 checkpoints of
    2 x 9,216 x 8,192 x 2 bytes, and of 72.7e9 parameters 18 bytes each (two bf16 copies, gradients, fp32 AdamW), shared
    by 256 GPUs: 79.5 GiB. a100-80g has 79.15, of which CUDA and NCCL take at least 1.4."""
    floor_bytes = 5 * 2 * 9216 * 152_064 * 4 + 80 * 2 * 9216 * 8192 * 2 + 18 * 72.7e9 / 256
    assert floor_bytes > find_gpu("a100-80g").capacity_bytes - 1.4 * 2**30
    page = (ROOT / "docs/documented-limits.md").read_text(encoding="utf-8")
    assert "- **full, tokens, a100-80g**: no size." in page


def test_sizes_are_written_as_ranges_of_neighbours():
    assert sizes([8, 16, 32, 96, 192, 256]) == "8-32, 96, 192-256"
    assert sizes([]) == "none"


def test_the_page_is_what_dpofit_says_today():
    command = [sys.executable, ROOT / "scripts" / "render_documented_limits.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
