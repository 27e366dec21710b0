"""`--fix OUT`: writes the usable pairs, capped, ordered, as a new data set folder; never touches the input."""

from __future__ import annotations

import json
import os
import random
from array import array
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpofit.data.check import UNUSABLE, Pass, read_pair
from dpofit.data.convert import ASSISTANT, FUNCTION, OBSERVATION, USER, Message, Pair
from dpofit.data.loading import Advance, LoadFailure, Row
from dpofit.data.rows import read_rows
from dpofit.data.spec import DATASET_INFO, Dataset, Spec
from dpofit.data.tokens import Counter
from dpofit.errors import BadInput, Problem

Outliers = Literal["drop", "cap", "keep"]
Order = Literal["shuffle", "longest-first", "keep"]
FILE_NAME = "pairs.jsonl"
REPORT_NAME = "report.json"
TAGS = {USER: "human", ASSISTANT: "gpt", OBSERVATION: "observation", FUNCTION: "function_call"}
MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True)
class FixPlan:
    """What --fix is asked to do. Limits are tokens, template included."""

    outliers: Outliers = "drop"
    max_prompt: int | None = None
    max_response: int | None = None
    cutoff_len: int | None = None
    order: Order = "shuffle"
    seed: int = 42


@dataclass(frozen=True, slots=True)
class FixReport:
    """What was done; written beside the data as report.json."""

    dataset: str
    rows_read: int
    pairs_written: int
    left_out: dict[str, int]  # reason -> rows
    answers_capped: int
    order: str
    seed: int
    token_counts: str  # exact or estimated, and from what
    train_with: dict[str, Any]  # recipe keys


def check_out_folder(out: Path, force: bool) -> None:
    """Raise BadInput if the folder holds something and --force was not given."""
    if out.exists() and not out.is_dir():
        raise BadInput(Problem(str(out), "--fix", "is a file", "Name a folder"))
    if out.is_dir() and any(out.iterdir()) and not force:
        raise BadInput(Problem(str(out), "--fix", "is not empty", "Name a new folder, or add --force"))


def write_fixed(
    name: str, datasets: Sequence[Dataset], run: Pass, counter: Counter, plan: FixPlan, out: Path, advance: Advance
) -> FixReport:
    """Second pass: the pairs of `run` again, without those to leave out, into OUT/pairs.jsonl with its entry.

    Memory: 17 bytes a pair. The pairs go through a scratch file in OUT, so that any order can be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    left_out: Counts[str] = Counts()
    reasons = _reasons(run)
    offsets, sizes = array("Q"), array("I")
    capped, index = 0, -1
    exact = run.lengths.all_exact
    scratch_path = out / f".{FILE_NAME}.scratch"
    media = any(getattr(d.spec, key) for d in datasets for key in MEDIA)
    try:
        with scratch_path.open("wb") as scratch:
            for row, dataset in _rows(datasets, advance):
                pair = read_pair(row, dataset)
                if not isinstance(pair, Pair):
                    left_out[f"data.{pair.reason}"] += 1
                    continue
                index += 1
                if reason := reasons.get(index):
                    left_out[reason] += 1
                    continue
                fitted, tokens = _fit(pair, run, index, counter, plan)
                if fitted is None:
                    left_out["over the length limits" if exact else "over the length limits, by estimate"] += 1
                    continue
                if fitted is not pair:
                    capped += 1
                offsets.append(scratch.tell())
                sizes.append(tokens)
                scratch.write(
                    (json.dumps(_row(fitted, row, dataset.spec, media), ensure_ascii=False) + "\n").encode(
                        "utf-8", "ignore"
                    )
                )
        _write_in_order(scratch_path, out / FILE_NAME, offsets, sizes, plan)
    finally:
        scratch_path.unlink(missing_ok=True)
    new_name = f"{name}_fixed"
    (out / DATASET_INFO).write_text(json.dumps({new_name: _entry(media)}, indent=2) + "\n", encoding="utf-8")
    train_with: dict[str, Any] = {"dataset_dir": str(out), "dataset": new_name}
    if plan.order == "longest-first":
        # llamafactory 0.9.5 train/dpo/trainer.py 139-143: the trainer shuffles unless told not to
        train_with["disable_shuffling"] = True
    report = FixReport(
        new_name, run.rows, len(offsets), dict(left_out), capped, plan.order, plan.seed, counter.basis, train_with
    )
    text = json.dumps({"schema": "dpofit.data-fix/1", **asdict(report)}, indent=2, ensure_ascii=False)
    (out / REPORT_NAME).write_text(text + "\n", encoding="utf-8")
    return report


def _rows(datasets: Sequence[Dataset], advance: Advance) -> Iterator[tuple[Row, Dataset]]:
    """The rows the pass saw: a file that breaks off gives those before the break."""
    for dataset in datasets:
        for path in dataset.files:
            try:
                for _, row in read_rows(path, advance):
                    yield row, dataset
            except LoadFailure:
                continue


def _reasons(run: Pass) -> dict[int, str]:
    """Pairs to leave out, by index, whatever their length."""
    remarked = np.frombuffer(run.remarked, np.uint8) if len(run.remarked) else np.array([], np.uint8)
    reasons = {int(i): f"data.{UNUSABLE[remarked[i] - 1]}" for i in np.flatnonzero(remarked)}
    repeats = run.hashes.repeats()
    for rows, reason in ((repeats.duplicates, "data.duplicate-pairs"), (repeats.contradictions, "data.contradictions")):
        for i in rows.tolist():
            reasons.setdefault(i, reason)
    return reasons


def _fit(pair: Pair, run: Pass, index: int, counter: Counter, plan: FixPlan) -> tuple[Pair | None, int]:
    """The pair within the limits (None if it cannot be), and its tokens a row."""
    full = run.lengths.full_at(index)
    room = min(
        limit for limit in (plan.max_response, _rest(plan.cutoff_len, full.prompt), 1 << 30) if limit is not None
    )
    too_long = max(full.chosen, full.rejected) > room
    if plan.outliers == "keep" or (not too_long and not _over(full.prompt, plan.max_prompt)):
        return pair, full.row
    if plan.outliers == "drop" or _over(full.prompt, plan.max_prompt):
        return None, 0
    answers = []
    for message, tokens in ((pair.chosen, full.chosen), (pair.rejected, full.rejected)):
        if tokens > room:
            own = counter.count(message.content)
            kept = room - (tokens - own)  # what the template adds stays
            if kept < 1:
                return None, 0
            message = Message(message.role, counter.clip(message.content, kept))
        answers.append(message)
    if answers[0] == answers[1] or not all(answer.content.strip() for answer in answers):
        return None, 0
    fitted = Pair(pair.prompt, answers[0], answers[1], pair.system, pair.tools, pair.media)
    return fitted, full.prompt + min(room, max(full.chosen, full.rejected))


def _rest(cutoff_len: int | None, prompt: int) -> int | None:
    return None if cutoff_len is None else cutoff_len - prompt


def _over(value: int, limit: int | None) -> bool:
    return limit is not None and value > limit


def _row(pair: Pair, row: Row, spec: Spec, media: bool) -> Row:
    """sharegpt with the default tags; '' rather than null, so that no column is empty in the first 10 MiB."""
    out: Row = {
        "system": pair.system,
        "conversations": [_message(message) for message in pair.prompt],
        "chosen": _message(pair.chosen),
        "rejected": _message(pair.rejected),
        "tools": pair.tools,
    }
    if media:
        for key in MEDIA:
            column = getattr(spec, key)
            value = row.get(column) if column else None
            out[key] = value if isinstance(value, list) else [] if value is None else [value]
    return out


def _message(message: Message) -> dict[str, str]:
    return {"from": TAGS[message.role], "value": message.content}


def _entry(media: bool) -> dict[str, Any]:
    columns = {
        "messages": "conversations",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "tools": "tools",
    }
    columns |= {key: key for key in MEDIA} if media else {}
    return {"file_name": FILE_NAME, "formatting": "sharegpt", "ranking": True, "columns": columns}


def _write_in_order(scratch: Path, target: Path, offsets: Sequence[int], sizes: Sequence[int], plan: FixPlan) -> None:
    order = np.arange(len(offsets))
    if plan.order == "shuffle":
        shuffled = order.tolist()
        random.Random(plan.seed).shuffle(shuffled)
        order = np.asarray(shuffled, dtype=np.int64)
    elif plan.order == "longest-first":
        order = np.argsort(-np.asarray(sizes, np.int64), kind="stable")
    partial = target.with_name(f".{target.name}.partial")
    with scratch.open("rb") as source, partial.open("wb") as file:
        for index in order.tolist():
            source.seek(offsets[index])
            file.write(source.readline())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
