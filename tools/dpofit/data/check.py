"""The one pass over the data: reads, converts, measures every row, and gathers what the findings are made from."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from dpofit.data.convert import Lost, Pair, convert
from dpofit.data.duplicates import PairHashes
from dpofit.data.json_rows import first_chunk_lines
from dpofit.data.kinds import ColumnKinds, Conflict
from dpofit.data.lengths import LengthTable
from dpofit.data.loading import Advance, LoadFailure, Row
from dpofit.data.remarks import PairRemarks
from dpofit.data.rows import CSV_CHUNK_ROWS, read_rows
from dpofit.data.sample import Reservoir
from dpofit.data.spec import Dataset
from dpofit.data.suggest import canonical
from dpofit.data.tokens import Counter, Measured
from dpofit.findings import Evidence

BATCH_PAIRS = 256
EXAMPLES = 5  # rows shown per finding
# Remarks for which --fix leaves a pair out: it teaches nothing or stops the run.
UNUSABLE = ("empty-answer", "identical-answers", "empty-prompt", "answer-role", "media-unsupported", "media-mismatch")


@dataclass(slots=True)
class Tally:
    """How often something was seen, and where first."""

    count: int = 0
    examples: list[Evidence] = field(default_factory=list)

    def add(self, where: str, text: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(Evidence(where, text))


@dataclass(slots=True)
class FileFacts:
    """What was seen of one file as a whole."""

    dataset: Dataset
    path: Path
    rows: int = 0
    failure: LoadFailure | None = None
    conflicts: list[Conflict] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    first_rows: list[Row] = field(default_factory=list)


class Pass:
    """Everything one pass over some data sets gathers. Memory: about 60 bytes a row and the sample."""

    def __init__(self, counter: Counter, remarks: PairRemarks, cutoff_len: int | None, sample_pairs: int) -> None:
        self.files: list[FileFacts] = []
        self.tallies: dict[str, Tally] = {}
        self.lengths = LengthTable()
        self.hashes = PairHashes()
        self.sample = Reservoir(sample_pairs)
        self._counter, self._remarks, self._cutoff_len = counter, remarks, cutoff_len
        self.remarked = array("B")  # per pair: 1 + index into UNUSABLE of the first such remark, 0 for none
        self._file_of, self._number_of = array("H"), array("I")
        self._waiting: list[tuple[Pair, str]] = []

    @property
    def rows(self) -> int:
        return sum(facts.rows for facts in self.files)

    @property
    def pairs(self) -> int:
        """Pairs that would be trained on, if nothing stopped the run."""
        return len(self.lengths)

    def number(self, index: int) -> int:
        """Row number, within its file, of a usable pair."""
        return self._number_of[index]

    def where(self, index: int) -> str:
        """`file:row` of a usable pair."""
        return f"{self.files[self._file_of[index]].path.name}:{self._number_of[index]}"

    def read(self, dataset: Dataset, advance: Advance) -> None:
        """Go through every row of a data set; a file that does not load is noted and left."""
        first: ColumnKinds | None = None
        for path in dataset.files:
            facts = FileFacts(dataset, path)
            self.files.append(facts)
            kinds = ColumnKinds(path.name, *_typing_rule(path))
            try:
                for number, row in read_rows(path, advance):
                    facts.rows += 1
                    kinds.see(number, row)
                    if len(facts.first_rows) < 1000:
                        facts.first_rows.append(row)
                    self._take(row, number, facts)
            except LoadFailure as failure:
                facts.failure = failure
            self._measure()
            facts.conflicts, facts.columns = kinds.conflicts, kinds.columns
            if first is None:
                first = kinds
            else:
                facts.conflicts += kinds.against(first)

    def _take(self, row: Row, number: int, facts: FileFacts) -> None:
        where = f"{facts.path.name}:{number}"
        converted = read_pair(row, facts.dataset)
        if isinstance(converted, Lost):
            self._note(converted.reason, where, converted.text)
            return
        self._file_of.append(len(self.files) - 1)
        self._number_of.append(number)
        self._waiting.append((converted, where))
        if len(self._waiting) == BATCH_PAIRS:
            self._measure()

    def _measure(self) -> None:
        for (pair, where), measured in zip(
            self._waiting, self._counter.measure([pair for pair, _ in self._waiting], self._cutoff_len), strict=True
        ):
            unusable = 0
            for check_id, text in self._remarks.on(pair):
                self._note(check_id, where, text)
                if check_id in UNUSABLE:
                    unusable = unusable or 1 + UNUSABLE.index(check_id)
            self.remarked.append(unusable)
            self.lengths.add(measured)
            self.hashes.add(pair)
            self.sample.offer(pair)
            for check_id in cut_marks(measured):
                self._note(check_id, where, _cut_text(measured))
        self._waiting.clear()

    def _note(self, check_id: str, where: str, text: str) -> None:
        self.tallies.setdefault(check_id, Tally()).add(where, text)


def read_pair(row: Row, dataset: Dataset) -> Pair | Lost:
    """The row as this data set is read."""
    if dataset.rewrites:
        rewritten = canonical(row)
        return (
            Lost("answer-shape", "not a known shape of pair") if rewritten is None else convert(rewritten, dataset.spec)
        )
    return convert(row, dataset.spec)


def cut_marks(measured: Measured) -> Iterator[str]:
    """Check ids of what `cutoff_len` took from one pair."""
    if measured.prompt_cut:
        yield "cutoff-prompt"
    if measured.chosen_loses_eos and measured.rejected_loses_eos:
        yield "cutoff-eos"
    elif measured.chosen_loses_eos or measured.rejected_loses_eos:
        yield "cutoff-one-eos"
    if measured.made_identical:
        yield "cutoff-identical"


def _cut_text(measured: Measured) -> str:
    full, kept = measured.lengths, measured.kept
    parts = [("prompt", full.prompt, kept.prompt), ("chosen", full.chosen, kept.chosen)]
    parts += [("rejected", full.rejected, kept.rejected)]
    return ", ".join(f"{name} {a:,}" if a == b else f"{name} {a:,} -> {b:,}" for name, a, b in parts) + " tokens"


def _typing_rule(path: Path) -> tuple[int | None, bool]:
    """(rows that fix the column types, whether text wins over numbers later) for ColumnKinds."""
    if path.suffix == ".csv":
        return CSV_CHUNK_ROWS, True
    return first_chunk_lines(path), False


def first_rows(path: Path, count: int) -> list[Row]:
    """The first rows of a file; fewer, or none, when it does not load."""
    rows: list[Row] = []
    try:
        rows += (row for _, row in islice(read_rows(path, lambda _: None), count))
    except LoadFailure:
        return rows
    return rows


def total_bytes(datasets: Sequence[Dataset]) -> int:
    """Size of all files, for the progress bar."""
    return sum(path.stat().st_size for dataset in datasets for path in dataset.files)
