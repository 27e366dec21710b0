"""Findings about how a data set is declared: its entry in dataset_info.json against the columns its files have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from dpofit.data.check import FileFacts, Pass
from dpofit.data.checks import DataFinding, found
from dpofit.data.loading import Row
from dpofit.data.spec import Dataset, Spec
from dpofit.data.suggest import suggest
from dpofit.findings import Evidence

READ_ALL = "every row"


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


def groups(run: Pass) -> list[Group]:
    """The files a pass read, by data set."""
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


def format_unknown(group: Group) -> DataFinding:
    """No entry names the files and no mapping fits them."""
    seen = (Evidence(group.dataset.files[0].name, f"rows have: {group.listed}"),)
    fix = group.suggested.text or "Name the columns of prompt, chosen and rejected in a dataset_info.json entry."
    return found("format-unknown", seen, "the first 1,000 rows", rows=group.rows, fix=fix)


def declaration_findings(group: Group) -> Iterator[DataFinding]:
    """What is wrong with the entry, or with the lack of one."""
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
