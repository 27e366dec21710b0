"""Whatever a log holds: no traceback, time in proportion to its size, and nothing added or lost by dull lines."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dpofit.doctor.knowledge import load
from tests.doctor.conftest import ids, read

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
EXAMPLES = sorted(
    {text for each in load().diagnoses.values() for text in (*each.examples.match, *each.examples.no_match)}
)
PIECES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(EXAMPLES).map(str.encode),
    st.sampled_from(
        [b"\r", b"\n", b"\x1b[", b"\x1b]0;", b"'loss': ", b"nan", b"'grad_norm': 1.2.3", b"training example:"]
    ),
)
DULL = st.text(st.sampled_from("abc xyz0123456789.:|[]%"), max_size=60).filter(lambda text: "%|" not in text)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30), st.lists(PIECES, max_size=5))
def test_any_bytes_give_a_report(pieces: list[bytes], more: list[bytes]) -> None:
    report = read(b"".join(pieces), b"\n".join(more))
    for finding in report.findings:
        assert finding.title and "{" not in finding.title.replace("{'", "")
        assert finding.evidence


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_an_example_cut_anywhere_gives_a_report(example: str, data: st.DataObject) -> None:
    raw = example.encode()
    start, end = sorted((data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, len(raw)))))
    read(raw[start:end])


@settings(max_examples=60, deadline=None)
@given(st.lists(DULL, max_size=20), st.lists(DULL, max_size=20))
def test_dull_lines_around_a_failure_change_nothing(before: list[str], after: list[str]) -> None:
    failure = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.76 GiB. GPU 3 has a total\n"
    report = read("".join(f"{line}\n" for line in before) + failure + "".join(f"{line}\n" for line in after))
    assert [finding.id for finding in report.findings] == ["memory.gpu-oom"]
    assert report.findings[0].evidence[0].where == f"node-0.log:{len(before) + 1}"


def test_many_copies_of_every_example_take_time_in_proportion() -> None:
    once = "\n".join(EXAMPLES).encode() + b"\n"

    def seconds(copies: int) -> float:
        start = time.process_time()
        read(once * copies)
        return time.process_time() - start

    seconds(1)
    assert seconds(20) < 20 * max(seconds(2), 0.02)  # linear would be 10 times


def test_one_endless_line_of_a_pattern_is_cheap() -> None:
    start = time.process_time()
    read(b"CUDA out of memory. Tried to allocate " * 200_000)
    read(b"'loss': nan " * 200_000)
    read(b"\x1b[0m" * 500_000)
    read(b"[rank0]: size mismatch for " * 200_000)
    assert time.process_time() - start < 10


def test_memory_is_flat_over_text_that_never_repeats() -> None:
    """5 MB of lines that are all new, each with an error that nobody knows: only bounded lists may stay."""
    words = ["".join(chr(97 + (n * k) % 26) for k in range(3, 11)) for n in range(1, 400)]
    text = "\n".join(
        f"{words[n % 399]} {words[n * 7 % 399]} {words[n * 31 % 397]} Error {words[n * 13 % 399]}{n}"
        for n in range(100_000)
    ).encode()
    ids(text)  # what is loaded once (patterns, numpy) is not what grows
    tracemalloc.start()
    try:
        assert ids(text) == []
        grown, _ = tracemalloc.get_traced_memory()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80e6
    assert grown < 1e6
