"""docs/long-context.md says what dpofit says, and its sums are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_on_32_cards_of_80_gb_and_a_terabyte_a_node_more_than_46k_fit_and_every_recipe_gains_four_times():
    [row] = re.findall(r"^\| `full-z3-long` \| ([\d,]+) host \|", PAGE, re.MULTILINE)
    assert int(row.replace(",", "")) >= 46_000
    gains = [int(times) for times in re.findall(r"\| (\d+)x \|$", PAGE, re.MULTILINE)]
    assert len(gains) >= 23 and min(gains) >= 4


def test_offload_checkpoints_goes_further_than_unsloth_gc_on_a_terabyte():
    def limit(name: str) -> int:
        [found] = re.findall(rf"^\| {name} \| ([\d,]+) \w+ \|", PAGE, re.MULTILINE)
        return int(found.replace(",", ""))

    assert limit("`full-z3-long`") >= 1.5 * limit("`full-z3-long`, unsloth gc in place of `offload_checkpoints`")
