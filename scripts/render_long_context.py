"""Writes the generated tables of docs/long-context.md: python scripts/render_long_context.py [--check] [--quick].

Tables stand between `<!-- generated: NAME -->` and `<!-- end -->`; `--check` fails when they are not what dpofit says
today; `--quick` leaves the table of all recipes, a minute of searching, as it stands. Traced figures come from
benchmarks/results/long-context-traced.json (benchmarks/long_context_traced.py), differences from stock from
longdpo-identity.json (benchmarks/tests_all.py), seconds from longdpo.json (benchmarks/longdpo.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from generated import parser, with_tables, write_or_check

from dpofit.memory.predict import predict
from dpofit.plan import DEFAULT_RESPONSE, JobFlags, plan_job, plan_jobs
from dpofit.recipe.cards import all_recipes, pieces_of, read_presets
from dpofit.recipe.long_context import PIECES
from dpofit.report.rows import LimitRow, limit_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "long-context.md"
RESULTS = ROOT / "benchmarks" / "results"
TRACED = RESULTS / "long-context-traced.json"
GIB = 2**30
FAMILY = "qwen2.5-72b-dpo"
PROMPTS = (8192, 32_768, 65_536)
COLUMNS = ("off", *PIECES, "all")
# Past the model's 32,768 positions LLaMA-Factory must scale them; memory does not change.
SCALED = ["rope_scaling=yarn"]
PRESETS = (
    "full-z3", "full-z3-liger-unsloth-gc", "full-z3-offload-liger-unsloth-gc", "full-z3-long", "full-z3-offload-long",
)  # fmt: skip
HOSTS = ("1000GiB", "2000GiB")
# How a comparison of tests/longdpo ran, by what is in its test's name; the first that fits.
RAN = {"two ranks, data parallel": "data_parallel", "two ranks, ZeRO-3": "zero3", "one process": ""}


def peaks_table() -> str:
    """Allocated bytes of one GPU of 32, by pieces and prompt: predicted, and traced where it has been."""
    traced = json.loads(TRACED.read_text(encoding="utf-8")) if TRACED.exists() else {}
    rows = []
    for pieces in COLUMNS:
        cells = ["stock" if pieces == "off" else f"`{pieces}`" if pieces in PIECES else "all five"]
        for prompt in PROMPTS:
            flags = JobFlags("a800-80g", 4, 8, "1000GiB", prompt=prompt, response=DEFAULT_RESPONSE, long_context=pieces)
            # As it was traced: one micro-batch a step.
            job = plan_job(f"{FAMILY}/full-z3-liger", [*SCALED, "gradient_accumulation_steps=1"], flags).job
            seen = traced.get(f"{pieces}:{prompt}")
            beside = f" ({seen['peak_bytes'] / GIB:,.1f})" if seen else ""
            cells.append(f"{predict(job).gpu.allocated_bytes / GIB:,.1f}{beside}")
        rows.append(cells)
    return _markdown(["pieces", *(f"{prompt:,} + 1,024" for prompt in PROMPTS)], rows, right_from=1)


def limits_table() -> str:
    """Longest prompts on 32 x A800-80G with either host."""
    columns, instead = [], []
    for ram in HOSTS:
        flags = JobFlags("a800-80g", 4, 8, ram, response=DEFAULT_RESPONSE)
        columns.append(limit_rows(plan_jobs([f"{FAMILY}/{name}" for name in PRESETS], SCALED, flags)))
        others = ",".join(piece for piece in PIECES if piece != "offload_checkpoints")
        flags = replace(flags, long_context=others)
        instead += limit_rows(plan_jobs([f"{FAMILY}/full-z3-long"], [*SCALED, "use_unsloth_gc=true"], flags))
    rows = []
    for index, name in enumerate(PRESETS):
        written = columns[0][index].planned.written_for
        documented = written.documented_prompt_tokens if written else None
        cells = [f"`{name}`", *(_limit(column[index]) for column in columns)]
        rows.append([*cells, f"{documented:,}" if documented else ""])
    rows.append(["`full-z3-long`, unsloth gc in place of `offload_checkpoints`", *map(_limit, instead), ""])
    return _markdown(["recipe", *(f"{ram} a node" for ram in HOSTS), "documented in 2024"], rows, right_from=1)


def recipes_table() -> str:
    """Every long recipe on its own cluster, beside itself with the pieces off."""
    presets = read_presets()
    names = [f"{e.file.family}/{e.file.name}" for e in all_recipes() if pieces_of(e.card, presets)]
    with_them, without = (
        limit_rows(plan_jobs(names, SCALED, JobFlags(response=DEFAULT_RESPONSE, long_context=pieces)))
        for pieces in (None, "off")
    )
    rows = []
    for name, long, stock in zip(names, with_them, without, strict=True):
        cluster = long.planned.job.cluster
        most, least = long.limit.prompt_tokens or 0, stock.limit.prompt_tokens
        times = f"{most / least:.0f}x" if least else "–"
        where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
        rows.append([f"`{name}`", where, _limit(stock), _limit(long), times])
    return _markdown(["recipe", "cluster", "pieces off", "on", ""], rows, right_from=2)


def flops_table() -> str:
    """Traced FLOPs of a pair, stock's step by that with the pieces and its share of the pass before step 1."""
    traced = json.loads(TRACED.read_text(encoding="utf-8"))
    rows = []
    for prompt in PROMPTS:
        stock, shared, everything = (traced[f"{name}:{prompt}"]["flops"] for name in ("off", "shared_prompt", "all"))
        with_pass = (everything["step"] + everything["reference_pass"] / epochs for epochs in (1, 3))
        ratios = (stock["step"] / flops for flops in (shared["step"], *with_pass))
        cells = [f"{prompt:,} + 1,024", f"{stock['step'] / 1e15:.1f}"]
        rows.append([*cells, *(f"{ratio:.2f}x" for ratio in ratios)])
    headings = ["tokens", "stock, PFLOP", "by `shared_prompt`", "by all five, 1 epoch", "3 epochs"]
    return _markdown(headings, rows, right_from=1)


def seconds_table() -> str:
    """Stock's seconds by those with the pieces, as measured."""
    rows = []
    for row in json.loads((RESULTS / "longdpo.json").read_text(encoding="utf-8"))["seconds"]["rows"]:
        if row["pieces"]:
            tokens = f"{row['pair']['prompt']:,} + {row['pair']['answer']:,}"
            ratios = (row["stock_by_it"][f"cached_reference_{epochs}"] for epochs in ("1_epoch", "3_epochs"))
            rows.append([tokens, ", ".join(f"`{name}`" for name in row["pieces"]), *(f"{one:.2f}x" for one in ratios)])
    return _markdown(["tokens", "with the reference cached and", "1 epoch", "3 epochs"], rows, right_from=2)


def identity_table() -> str:
    """The largest differences from stock of all comparisons that the tests made, by where they ran and with what."""
    document = json.loads((RESULTS / "longdpo-identity.json").read_text(encoding="utf-8"))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {
        (where, pieces): [] for where in RAN for pieces in (*PIECES, "several")
    }
    for row in document["errors"]:
        where = next(where for where, part in RAN.items() if part in row["test"])
        groups[where, row["pieces"] if row["pieces"] in PIECES else "several"].append(row)
    rows = []
    for (where, pieces), found in groups.items():
        if not found:
            continue
        loss, gradients = (max(row[name] for row in found) for name in ("loss", "gradients"))
        logps = max(row[name] for row in found for name in ("logps", "reference"))
        what = f"`{pieces}`" if pieces in PIECES else "two to five at once"
        comparisons = sum(row["comparisons"] for row in found)
        rows.append([where, what, f"{comparisons:,}", *(f"{error:.1e}" for error in (loss, logps, gradients))])
    headings = ["ran as", "pieces", "comparisons", "loss", "log-probs", "gradients"]
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in document["counts"].items())
    commits = ", ".join(commit[:9] for commit in document["commits"])
    return f"{_markdown(headings, rows, right_from=2)}\n\nTests: {counts}; {document['dates'][-1]}, commit {commits}."


def _limit(row: LimitRow) -> str:
    tokens = row.limit.prompt_tokens
    return "nothing" if tokens is None else f"{tokens:,} {row.limit.binding}"


def _markdown(headings: list[str], rows: list[list[str]], right_from: int) -> str:
    rule = ["---" if index < right_from else "---:" for index in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


TABLES: dict[str, Callable[[], str]] = {
    "peaks": peaks_table, "limits": limits_table, "recipes": recipes_table, "flops": flops_table,
    "seconds": seconds_table, "identity": identity_table,
}  # fmt: skip


def main() -> int:
    """Writes or checks the page; the exit code."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="leave the table of all recipes as it stands")
    given = options.parse_args()
    tables = {name: table for name, table in TABLES.items() if not (given.quick and table is recipes_table)}
    return write_or_check({PAGE: with_tables(PAGE, tables)}, given.check)


if __name__ == "__main__":
    raise SystemExit(main())
