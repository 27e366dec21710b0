"""Writes the generated tables of README.md and the plots it shows: python scripts/render_readme.py [--check].

Tables stand between `<!-- generated: NAME -->` and `<!-- end -->`; `--check` fails when they are not what dpofit says
today. Plots are written, not compared: their bytes differ between versions of matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from generated import parser, with_tables, write_or_check

from dpofit.plan import DEFAULT_RESPONSE, JobFlags, plan_jobs
from dpofit.report.compare import compare_document
from dpofit.report.limits import limits_document
from dpofit.report.rows import ComparisonRow, LimitRow, comparison_rows, limit_rows

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
GIB = 2**30
FAMILIES = ("qwen2.5-72b-dpo", "qwen2.5-7b-dpo")
DOCUMENTED = ("full-z3", "full-z3-liger-unsloth-gc", "full-z3-offload-liger-unsloth-gc")
CLUSTERS = (
    JobFlags(gpu="a100-80g", nodes=4, gpus_per_node=8, host_ram="1000GiB", response=DEFAULT_RESPONSE),
    JobFlags(gpu="a100-80g", nodes=16, gpus_per_node=8, host_ram="1000GiB", response=DEFAULT_RESPONSE),
    JobFlags(gpu="h20-96g", nodes=12, gpus_per_node=8, host_ram="2000GiB", response=DEFAULT_RESPONSE),
    JobFlags(gpu="h200-141g", nodes=4, gpus_per_node=8, host_ram="2000GiB", response=DEFAULT_RESPONSE),
)


def compared(family: str) -> list[ComparisonRow]:
    return comparison_rows(plan_jobs([family], [], JobFlags()))


def comparison_table(family: str) -> str:
    """Recipes of a family on the clusters they are written for."""
    rows = [
        [
            f"`{_short(row['recipe'])}`", _cluster(found), row["verdict"],
            f"{row['gpu']['peak_bytes'] / GIB:,.1f} of {row['gpu']['capacity_bytes'] / GIB:,.1f}",
            f"{row['host']['peak_bytes'] / GIB:,.0f}", f"{row['disk']['checkpoint_bytes'] / GIB:,.0f}",
            _tokens(row["limit"]["longest_prompt_tokens"]), f"{row['time']['relative_seconds_per_pair']:.2f}x",
        ]
        for found, row in _documents(compared(family))
    ]  # fmt: skip
    headings = ["recipe", "written for", "verdict", "GPU GiB", "host GiB", "checkpoint GiB", "prompt fits", "time"]
    return _markdown(headings, rows, right_from=3)


def _documents(rows: list[ComparisonRow]) -> list[tuple[ComparisonRow, dict]]:
    return list(zip(rows, compare_document(rows, pairs=10_000)["rows"], strict=True))


def limits_table() -> str:
    """The three documented presets' longest prompts on several clusters."""
    columns: list[tuple[str, list[LimitRow]]] = []
    for flags in CLUSTERS:
        rows = limit_rows(plan_jobs([f"{FAMILIES[0]}/{name}" for name in DOCUMENTED], [], flags))
        columns.append((f"{flags.nodes} x {flags.gpus_per_node} {flags.gpu}, {flags.host_ram}", rows))
    body = []
    for index, name in enumerate(DOCUMENTED):
        cells = [f"`{name}`"]
        for _, rows in columns:
            row = limits_document([rows[index]])["rows"][0]
            low, high = row["longest_prompt_tokens"], row["longest_not_oom_prompt_tokens"]
            cells.append(f"{_tokens(low)} ({_tokens(high)}) {row['binding']}")
        documented = columns[0][1][index].planned.written_for
        assert documented is not None
        cells.append(_tokens(documented.documented_prompt_tokens))
        body.append(cells)
    return _markdown(["recipe", *(name for name, _ in columns), "documented"], body, right_from=1)


def _tokens(value: int | None) -> str:
    return "nothing" if value is None else f"{value:,}"


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _cluster(row: ComparisonRow) -> str:
    cluster = row.planned.job.cluster
    return f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], right_from: int) -> str:
    rule = ["---" if index < right_from else "---:" for index in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def agreement_sentence() -> str:
    """How well closed form and trace agree, from the committed grid."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from agreement_report import read, sentence

    return sentence(read())


TABLES: dict[str, Callable[[], str]] = {
    "compare 72b": lambda: comparison_table(FAMILIES[0]),
    "compare 7b": lambda: comparison_table(FAMILIES[1]),
    "limits": limits_table,
    "agreement": agreement_sentence,
}


def plots() -> None:
    """The pictures README shows."""
    from dpofit.memory.predict import predict
    from dpofit.report.plot import plot_lengths, plot_phases

    images = ROOT / "docs" / "images"
    [planned] = plan_jobs([f"{FAMILIES[0]}/full-z3"], [], JobFlags())
    plot_phases(predict(planned.job, planned.mix), images / "phases.svg", force=True)
    names = [f"{FAMILIES[0]}/{name}" for name in (*DOCUMENTED, "full-z3-orpo", "full-z3-unsloth-gc")]
    plot_lengths(comparison_rows(plan_jobs(names, [], CLUSTERS[2])), images / "lengths.svg", force=True)


def main() -> int:
    """Writes or checks the page, and writes the plots; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    if not check:
        plots()
    return write_or_check({README: with_tables(README, TABLES)}, check)


if __name__ == "__main__":
    raise SystemExit(main())
