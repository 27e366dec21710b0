"""Writes the generated tables of docs/save-guard.md: python scripts/render_save_guard.py [--check].

Tables stand between `<!-- generated: NAME -->` and `<!-- end -->`; `--check` fails when they are not what the committed
benchmark results (benchmarks/results/save-*.json, verify-speed.json) and the formulas on the page say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from generated import parser, with_tables, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "save-guard.md"
RESULTS = ROOT / "benchmarks" / "results"
SAVES = {"weights": "save-weights-1000m.json", "checkpoint": "save-checkpoint-300m.json"}
MIB = 2**20
GB = 1e9

PARAMETERS = 72.7e9  # Qwen2.5-72B
WEIGHT_BYTES, STATE_BYTES = 2, 12  # a parameter in bf16; its fp32 master and two Adam moments
DISKS_GB_S = (2, 20)
RANKS = (8, 32)
RANK_GB_S = 1.0  # what one rank hashes and writes; the stock save's one writer too


def result(name: str) -> dict[str, Any]:
    """One committed benchmark result."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def saves_table() -> str:
    """Writers beside each other, from benchmarks/save.py."""
    lines = ["| what | writer | seconds, durable | against guard | extra, MiB | left in cache, MiB |"]
    lines.append("|---|---|---|---|---|---|")
    for what, file in SAVES.items():
        document = result(file)
        size = f"{document['summary'][0]['written_bytes'] / 1e6:,.0f} MB"
        for index, row in enumerate(document["summary"]):
            lines.append(
                f"| {f'{what}, {size}' if index == 0 else ''} | {row['writer']} | {row['seconds_durable']:.1f} "
                f"| {row['durable_against_guard']:.2f} | {row['peak_extra_bytes'] / MIB:,.0f} "
                f"| {row['page_cache_bytes'] / MIB:,.0f} |"
            )
    return "\n".join(lines)


def verify_table() -> str:
    """`dpofit verify` beside cat and hashlib on one core, from benchmarks/verify_speed.py."""
    document = result("verify-speed.json")
    lines = [
        f"| {document['bytes'] / GB:.1f} GB, page cache warm, {document['machine']['cpus']} cores | GB/s, wall "
        "| best round | GB a CPU second | wall against hashlib |",
        "|---|---|---|---|---|",
    ]
    for row in document["summary"]:
        lines.append(
            f"| {row['what']} | {row['gb_per_s']:.2f} | {row['gb_per_s_best']:.2f} | {row['gb_per_cpu_s']:.2f} "
            f"| {row['wall_against_one_core']:.1f} |"
        )
    return "\n".join(lines)


def paper_table() -> str:
    """A 72B by the formulas on the page."""
    weights, whole = PARAMETERS * WEIGHT_BYTES / GB, PARAMETERS * (WEIGHT_BYTES + STATE_BYTES) / GB
    lines = [
        "| ranks | disk, GB/s | weights, stock | held on one node | weights, guard | whole, guard "
        "| a rank writes (weights, whole) |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        for disk in DISKS_GB_S:
            stock = weights / min(disk, RANK_GB_S)
            guard, all_of_it = (max(size / disk, size / (ranks * RANK_GB_S)) for size in (weights, whole))
            lines.append(
                f"| {ranks} | {disk} | {stock:.0f} s | {weights:.0f} GB, {2 * weights:.0f} with the leak "
                f"| {guard:.1f} s | {all_of_it:.0f} s | {weights / ranks:.1f} GB, {whole / ranks:.0f} GB |"
            )
    return "\n".join(lines)


TABLES = {"saves": saves_table, "verify": verify_table, "paper": paper_table}


def main() -> int:
    """Writes or checks the page; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    return write_or_check({PAGE: with_tables(PAGE, TABLES)}, check)


if __name__ == "__main__":
    raise SystemExit(main())
