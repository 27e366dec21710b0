"""Turns what a pass gathered into findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpofit.data.check import EXAMPLES, FileFacts, Pass, Tally
from dpofit.data.checks import CHECKS, DataFinding, found
from dpofit.data.duplicates import near_copies
from dpofit.data.kinds import ABSENT, Conflict
from dpofit.data.quality import LONGER_SHARE, SEPARABLE_SHARE, TINY_EDIT_SHARE, LengthBias, PolicyView, edits, style
from dpofit.data.rows import Row
from dpofit.data.spec import Dataset, Spec
from dpofit.data.suggest import suggest
from dpofit.findings import Evidence

# Reasons for which convert() gives no pair; the rest of the tallies are about usable pairs.
ANSWER_REASONS = ("answer-missing", "answer-shape", "not-ranked")
READ_ALL = "every row"


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
    for group in _groups(run):
        if group.rows and group.unknown:
            yield _format_unknown(group)
            return
        if group.rows:
            yield from _declaration(group)
    if run.rows and not run.pairs:
        entry = next((entry for group in _groups(run) if (entry := group.suggested)), NOTHING_SUGGESTED)
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


@dataclass(frozen=True, slots=True)
class Mapped:
    """A fix by mapping, and the dataset_info.json entry that it is."""

    text: str
    entry: Mapping[str, Any] | None


NOTHING_SUGGESTED = Mapped("", None)


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one data set, together."""

    dataset: Dataset
    rows: int
    columns: frozenset[str]
    first_rows: tuple[Row, ...]

    @property
    def unknown(self) -> bool:
        """Whether nothing declares the format, and no mapping that dpofit knows gives pairs."""
        return self.dataset.declared_in is None and self.suggested.entry is None

    @property
    def listed(self) -> str:
        """The columns that the rows have."""
        return ", ".join(sorted(column for column in self.columns if "." not in column and "[" not in column))

    @property
    def suggested(self) -> Mapped:
        """The mapping or rewriting under which the first rows give pairs."""
        suggestion = suggest(self.first_rows)
        if suggestion is None:
            return NOTHING_SUGGESTED
        share = f"{suggestion.pairs:,} of the first {suggestion.rows:,} rows"
        if suggestion.rewrites:
            text = (
                f"No mapping can express these rows, but {share} can be rewritten into pairs: dpofit data … --fix OUT."
            )
            return Mapped(text, None)
        first = self.dataset.files[0]
        entry = {
            self.dataset.name: suggestion.spec.entry(first.name if len(self.dataset.files) == 1 else first.parent.name)
        }
        return Mapped(f"This entry of dataset_info.json gives pairs from {share}: {json.dumps(entry)}", entry)


def _groups(run: Pass) -> list[Group]:
    by_dataset: dict[int, list[FileFacts]] = {}
    for facts in run.files:
        by_dataset.setdefault(id(facts.dataset), []).append(facts)
    return [
        Group(
            files[0].dataset,
            sum(facts.rows for facts in files),
            frozenset().union(*(facts.columns for facts in files)),
            tuple(row for facts in files for row in facts.first_rows)[:1000],
        )
        for files in by_dataset.values()
    ]


def _format_unknown(group: Group) -> DataFinding:
    seen = (Evidence(group.dataset.files[0].name, f"rows have: {group.listed}"),)
    fix = group.suggested.text or "Name the columns of prompt, chosen and rejected in a dataset_info.json entry."
    return found("format-unknown", seen, "the first 1,000 rows", rows=group.rows, fix=fix)


def _declaration(group: Group) -> Iterator[DataFinding]:
    dataset, spec, mapped = group.dataset, group.dataset.spec, group.suggested
    where = f"{dataset.declared_in.name if dataset.declared_in else 'guessed'}: {dataset.name}"
    if dataset.declared_in is None:
        seen = (Evidence(dataset.name, spec.formatting),)
        yield found("format-guessed", seen, "the first 1,000 rows", fix=mapped.text, entry=mapped.entry)
    if not spec.ranking:
        yield found("not-ranked", (Evidence(where, f"ranking: {spec.ranking}"),), READ_ALL)
    elif spec.ranking is not True:
        value = repr(spec.ranking)
        yield found("ranking-not-boolean", (Evidence(where, f"ranking: {value}"),), READ_ALL, {"value": value})
    if dataset.unknown_keys:
        keys = ", ".join(dataset.unknown_keys)
        yield found("info-unknown-key", (Evidence(where, keys),), READ_ALL, {"keys": keys})
    if spec.kto_tag and any(isinstance(row.get(spec.kto_tag), bool) for row in group.first_rows):
        yield found("kto-rows", (Evidence(where, f"kto_tag: {spec.kto_tag}"),), READ_ALL, {"column": spec.kto_tag})
    for absent in absent_columns(spec, group.columns):
        fix = mapped.text or f"Name one of the columns the rows have: {group.listed}."
        seen = (Evidence(where, f"rows have: {group.listed}"),)
        yield found("column-absent", seen, READ_ALL, {"column": absent}, group.rows, fix, mapped.entry)
    if spec.formatting == "openai":
        yield found("openai-system", (Evidence(where, "formatting: openai"),), READ_ALL)


def absent_columns(spec: Spec, columns: Set[str]) -> list[str]:
    """Keys the converter looks up that no row has: a KeyError in the first row."""
    absent = [name for name in spec.columns_used() if name not in columns]
    if spec.ranking:
        absent += [f"{key} (not named in `columns`)" for key in ("chosen", "rejected") if getattr(spec, key) is None]
    if spec.formatting != "alpaca":
        parents = [f"{spec.messages}[]", spec.chosen or "", spec.rejected or ""]
        for parent in parents:
            has_keys = any(column.startswith(f"{parent}.") for column in columns)
            tags = (spec.role_tag, spec.content_tag)
            absent += [f"{parent}.{tag}" for tag in tags if has_keys and f"{parent}.{tag}" not in columns]
    return absent


def _row_findings(run: Pass, skip_lost: bool) -> Iterator[DataFinding]:
    for check_id, tally in run.tallies.items():
        if check_id.startswith("cutoff-") or (skip_lost and check_id in ANSWER_REASONS):
            continue
        if check_id in ("not-ranked", "kto-rows"):
            continue  # said once for the data set
        mapped = NOTHING_SUGGESTED
        if check_id in ("answer-shape", "role-tags"):
            mapped = next((m for group in _groups(run) if (m := group.suggested).text), NOTHING_SUGGESTED)
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
