"""Turns what a pass gathered into findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpofit.data.check import EXAMPLES, Pass, Tally
from dpofit.data.checks import CHECKS, DataFinding, found
from dpofit.data.declared import NOTHING_SUGGESTED, READ_ALL, declaration_findings, format_unknown, groups
from dpofit.data.duplicates import near_copies
from dpofit.data.kinds import ABSENT, Conflict
from dpofit.data.quality import LONGER_SHARE, SEPARABLE_SHARE, TINY_EDIT_SHARE, LengthBias, PolicyView, edits, style
from dpofit.findings import Evidence

# Reasons for which convert() gives no pair; the rest of the tallies are about usable pairs.
ANSWER_REASONS = ("answer-missing", "answer-shape", "not-ranked")


@dataclass(frozen=True, slots=True)
class Context:
    """What the findings need beside the passes."""

    cutoff_len: int | None
    why_estimated: str  # "" when counts are exact
    val_size: float
    policy: PolicyView | None


def findings(train: Pass, evaluation: Pass | None, context: Context) -> list[DataFinding]:
    """Every finding, errors first, in the order of docs/data-checks.md."""
    out = list(_file_findings(train))
    if any(finding.id == "data.format-unknown" for finding in out):
        return out  # what else could be said would be about a mapping that nobody chose
    stops_early = {finding.id for finding in out} & {"data.column-absent", "data.not-ranked"}
    out += _row_findings(train, skip_lost=bool(stops_early))
    if train.pairs:
        out += [_as_sure_as_lengths(finding, train) for finding in _length_findings(train, context)]
        out += _repeat_findings(train, evaluation, context)
        out += _quality_findings(train, context)
    order = {"error": 0, "warning": 1, "info": 2}
    place = {check_id: n for n, check_id in enumerate(CHECKS)}
    return sorted(out, key=lambda finding: (order[finding.severity], place[finding.id.removeprefix("data.")]))


def _file_findings(run: Pass) -> Iterator[DataFinding]:
    for facts in run.files:
        failure = facts.failure
        if failure is not None:
            seen = (Evidence(failure.where, failure.why),)
            yield found("load-failed", seen, READ_ALL, {"why": failure.why}, fix=failure.fix)
        for conflict in facts.conflicts:
            yield _conflict(conflict)
    for group in groups(run):
        if group.rows and group.unknown:
            yield format_unknown(group)
            return
        if group.rows:
            yield from declaration_findings(group)
    if run.rows and not run.pairs:
        entry = next((entry for group in groups(run) if (entry := group.suggested)), NOTHING_SUGGESTED)
        fix = entry.text or "Give each row a prompt, a chosen and a rejected answer."
        seen = (Evidence(run.files[0].path.name, f"{run.rows:,} rows"),)
        yield found("no-usable-rows", seen, READ_ALL, rows=run.rows, fix=fix, entry=entry.entry)


def _conflict(conflict: Conflict) -> DataFinding:
    second = Evidence(conflict.second_where, f"{conflict.column}: {conflict.second}")
    if conflict.first == ABSENT:
        return found("late-column", (second,), READ_ALL, {"column": conflict.column})
    first = Evidence(conflict.first_where, f"{conflict.column}: {conflict.first}")
    words = {"column": conflict.column, "first": conflict.first, "second": conflict.second}
    return found("mixed-types", (first, second), READ_ALL, words)


def _row_findings(run: Pass, skip_lost: bool) -> Iterator[DataFinding]:
    for check_id, tally in run.tallies.items():
        if check_id.startswith("cutoff-") or (skip_lost and check_id in ANSWER_REASONS):
            continue
        if check_id in ("not-ranked", "kto-rows"):
            continue  # said once for the data set
        mapped = NOTHING_SUGGESTED
        if check_id in ("answer-shape", "role-tags"):
            mapped = next((m for group in groups(run) if (m := group.suggested).text), NOTHING_SUGGESTED)
        general = "Write the answers as the format wants them, and the tags as the data has them."
        fix = (mapped.text or general) if check_id in ("answer-shape", "role-tags") else ""
        yield _tallied(check_id, tally, run.rows, fix, entry=mapped.entry)


def _tallied(
    check_id: str,
    tally: Tally,
    total: int,
    fix: str = "",
    words: Mapping[str, str] | None = None,
    entry: Mapping[str, Any] | None = None,
) -> DataFinding:
    said = {"rows": f"{tally.count:,} of {total:,} rows", **(words or {})}
    return found(check_id, tally.examples, READ_ALL, said, tally.count, fix, entry)


def _length_findings(run: Pass, context: Context) -> Iterator[DataFinding]:
    table = run.lengths
    if not table.all_exact:
        why = context.why_estimated or f"{table.estimated:,} pairs have tools, function calls or media"
        yield found("lengths-estimated", (Evidence("tokens", why),), READ_ALL, {"why": why}, table.estimated)
    longest = f"{int(table.full_row.max()):,}"
    for check_id in ("cutoff-prompt", "cutoff-eos", "cutoff-one-eos", "cutoff-identical"):
        if tally := run.tallies.get(check_id):
            yield _tallied(check_id, tally, run.rows, words={"cutoff": f"{context.cutoff_len:,}", "longest": longest})
    long = table.long_answers()
    if len(long):
        answers = np.maximum(table.chosen, table.rejected)
        worst = long[np.argsort(answers[long], kind="stable")[::-1][:EXAMPLES]]
        seen = tuple(Evidence(run.where(int(i)), f"answer of {answers[i]:,} tokens") for i in worst)
        yield found("answers-over-1k", seen, READ_ALL, _of_pairs(len(long), run), len(long))
    few = table.outliers()
    if few is not None:
        seen = tuple(Evidence(run.where(i), f"{table.row[i]:,} tokens a row") for i in few.indices[:EXAMPLES])
        seen += (Evidence("the rest", f"at most {few.longest_of_rest:,} tokens a row"),)
        text = {"few": f"{few.count:,}", "total": f"{run.pairs:,}", "ratio": f"{few.ratio:.1f}"}
        yield found("length-outliers", seen, READ_ALL, text, few.count)


def _as_sure_as_lengths(finding: DataFinding, run: Pass) -> DataFinding:
    """What is said of lengths is no surer than they are."""
    if run.lengths.all_exact or finding.id == "data.lengths-estimated" or finding.confidence != "certain":
        return finding
    return replace(finding, confidence="likely", basis="estimated lengths of every row")


def _repeat_findings(run: Pass, evaluation: Pass | None, context: Context) -> Iterator[DataFinding]:
    repeats = run.hashes.repeats()
    for check_id, rows, verb in (
        ("duplicate-pairs", repeats.duplicates, "repeats"),
        ("contradictions", repeats.contradictions, "is the reverse of"),
    ):
        if len(rows):
            seen = [
                Evidence(run.where(int(i)), f"{verb} {run.where(repeats.partner[int(i)])}") for i in rows[:EXAMPLES]
            ]
            yield found(check_id, seen, READ_ALL, _of_pairs(len(rows), run), len(rows))
    sample = run.sample.pairs
    near = near_copies([pair.prompt for pair in sample])
    if near:
        seen = [
            Evidence(run.where(sample[a].index), f"its prompt is nearly that of {run.where(sample[b].index)}")
            for a, b in near[:EXAMPLES]
        ]
        yield found("near-duplicates", seen, run.sample.basis, {"share": _share(len(near), len(sample))}, len(near))
    if evaluation is not None and evaluation.pairs:
        yield from _leaks(run, evaluation)
    if context.val_size > 0:
        leak = run.hashes.split_leak(context.val_size)
        if leak >= 0.005:  # shown in whole percents
            seen_once = Evidence("prompts", f"{repeats.distinct_prompts:,} distinct in {run.pairs:,} pairs")
            yield found("val-split-leak", (seen_once,), READ_ALL, {"share": f"{leak:.0%}"})


def _leaks(run: Pass, evaluation: Pass) -> Iterator[DataFinding]:
    both = run.hashes.prompts_in(evaluation.hashes)
    if len(both):
        seen = tuple(Evidence(run.where(int(i)), "its prompt is in the evaluation set") for i in both[:EXAMPLES])
        yield found("eval-leak", seen, READ_ALL, _of_pairs(len(both), run), len(both))
    sample, held = run.sample.pairs, evaluation.sample.pairs
    near = near_copies([pair.prompt for pair in sample], [pair.prompt for pair in held])
    if near:
        seen = tuple(
            Evidence(run.where(sample[a].index), f"nearly the prompt of {evaluation.where(held[b].index)}")
            for a, b in near[:EXAMPLES]
        )
        yield found("eval-near-leak", seen, run.sample.basis, {"share": _share(len(near), len(sample))}, len(near))


def _quality_findings(run: Pass, context: Context) -> Iterator[DataFinding]:
    table, sample, basis = run.lengths, run.sample.pairs, run.sample.basis
    bias = LengthBias.of(table.full_chosen, table.full_rejected)
    if bias.longer.above(LONGER_SHARE):
        longer = Evidence("lengths", f"{bias.longer}; median chosen / rejected {bias.median_ratio:.2f}")
        yield found("length-bias", (longer,), READ_ALL, {"share": f"{bias.longer.value:.0%}"}, bias.longer.hits)
    told = style(sample)
    if told.accuracy.above(SEPARABLE_SHARE):
        words = (
            Evidence("held out", str(told.accuracy)),
            Evidence("words of chosen", " ".join(told.chosen_words)),
            Evidence("words of rejected", " ".join(told.rejected_words)),
        )
        yield found("style-separable", words, basis, {"share": f"{told.accuracy.value:.0%}"})
    alike = edits(sample)
    if alike.unrelated:
        other = f"answers to different prompts {alike.unrelated_median:.2f}, 95th percentile {alike.unrelated_p95:.2f}"
        yield found("chosen-not-an-edit", (Evidence("word similarity", f"median {alike.median:.2f}; {other}"),), basis)
    if alike.tiny.above(TINY_EDIT_SHARE):
        close = Evidence("word similarity", f"0.95 or more in {alike.tiny}")
        yield found("tiny-edits", (close,), basis, {"share": f"{alike.tiny.value:.0%}"})
    policy = context.policy
    if policy is not None and policy.chosen_likelier.above(0.5):
        text = f"mean per token: chosen {policy.chosen_mean:.2f}, rejected {policy.rejected_mean:.2f} nats"
        view = Evidence("log-probabilities", f"{policy.chosen_likelier}; {text}")
        yield found("rejected-off-policy", (view,), "--logps", {"share": f"{policy.chosen_likelier.value:.0%}"})


def _of_pairs(count: int, run: Pass) -> dict[str, str]:
    return {"rows": f"{count:,} of {run.pairs:,} pairs"}


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"
