"""docs/long-context.md says what dpofit says, and its sums are right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.memory.predict import predict
from dpofit.plan import DEFAULT_RESPONSE, JobFlags, plan_job
from dpofit.recipe.cards import all_recipes, pieces_of, read_presets
from dpofit.recipe.long_context import PIECES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "long-context.md").read_text(encoding="utf-8")


def test_generated_tables_are_what_dpofit_says_today():
    command = [sys.executable, ROOT / "scripts" / "render_long_context.py", "--check"]
    command += [] if os.environ.get("DPOFIT_TEST_ALL") else ["--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_piece_has_its_section_and_every_link_leads_somewhere():
    assert re.findall(r"^## (\w+_\w+)$", PAGE, re.MULTILINE) == list(PIECES)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in link]
    assert links and [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_sums_are_right():
    gib = 2**30
    assert round(5 * 2 * 9216 * 152_064 * 4 / gib, 1) == 52.2
    assert round((2 + 4 + 4) * 512 * 152_064 / gib, 1) == 0.7
    assert (2 * (8192 + 1024), 8192 + 2 * 1024) == (18_432, 10_240)
    assert round(72.7e9 * 2 / 32 / gib, 1) == 4.2
    assert round(8 * 29_568 * 67_584 / gib, 1) == 14.9
    assert round((8 * 29_568 * 4096 + 4 * 8192 * 29_568 * 4) / gib, 1) == 4.5
    assert (2 * 9216 * 8192 * 2 / 2**20, 512 * 80 * 8 / 1024, 288 * 80 * 8 / 1024) == (288.0, 320.0, 180.0)
    for said in ("52.2 GiB", "0.7 GiB", "18,432", "10,240", "4.2 GiB", "14.9 GiB", "4.5 GiB", "320 GiB", "180 GiB"):
        assert said in PAGE


def test_on_32_cards_of_80_gb_and_a_terabyte_a_node_more_than_46k_fit():
    [row] = re.findall(r"^\| `full-z3-long` \| ([\d,]+) host \|", PAGE, re.MULTILINE)
    assert int(row.replace(",", "")) >= 46_000


def test_every_long_recipe_fits_four_times_the_prompt_at_which_stock_no_longer_does():
    presets = read_presets()
    long = [f"{entry.file.family}/{entry.file.name}" for entry in all_recipes() if pieces_of(entry.card, presets)]
    rows = re.findall(r"^\| `(\S+/\S+)` \| .*? \| ([\d,]+) \w+ \| [\d,]+ \w+ \| \d+x \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == long

    def verdict(name: str, prompt: int, pieces: str | None) -> str:
        flags = JobFlags(prompt=prompt, response=DEFAULT_RESPONSE, long_context=pieces)
        return predict(plan_job(name, ["rope_scaling=yarn"], flags).job).verdict

    for name, stock in rows:
        beyond = int(stock.replace(",", "")) * 102 // 100
        assert (name, verdict(name, 4 * beyond, None)) == (name, "fits")
        if os.environ.get("DPOFIT_TEST_ALL"):  # where the table itself is checked too
            assert (name, verdict(name, beyond, "off")) != (name, "fits")


def test_flops_of_a_pair_fall_1_7_times_at_8k_and_1k_with_the_reference_cached_for_one_epoch():
    """Counted in the trace; the sum written out for stock: benchmarks/longdpo.py counts the same by another way."""
    traced = json.loads((ROOT / "benchmarks" / "results" / "long-context-traced.json").read_text(encoding="utf-8"))
    stock, everything = (traced[f"{pieces}:8192"]["flops"] for pieces in ("off", "all"))
    assert stock["step"] / (everything["step"] + everything["reference_pass"]) >= 1.7
    rows = json.loads((ROOT / "benchmarks" / "results" / "longdpo.json").read_text(encoding="utf-8"))["flops"]["rows"]
    counted = next(row["PFLOP"] for row in rows if row["pair"]["prompt"] == 8192 and not row["pieces"])
    assert stock["step"] == pytest.approx((counted["forward"] + counted["training"]) * 1e15, rel=1e-3)


def test_offload_checkpoints_goes_further_than_unsloth_gc_on_a_terabyte():
    def limit(name: str) -> int:
        [found] = re.findall(rf"^\| {name} \| ([\d,]+) \w+ \|", PAGE, re.MULTILINE)
        return int(found.replace(",", ""))

    assert limit("`full-z3-long`") >= 1.5 * limit("`full-z3-long`, unsloth gc in place of `offload_checkpoints`")
