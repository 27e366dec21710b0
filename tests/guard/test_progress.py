"""A long save shows a bar on a terminal; a short one, or one whose output goes to a file, doesn't."""

from __future__ import annotations

import io

import pytest

from dpofit.train.guard.progress import slower_line, weights_bar

GIB = 2**30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "total", "shown"),
    [(Terminal(), 8 * GIB, True), (Terminal(), GIB, False), (io.StringIO(), 8 * GIB, False)],
    ids=["long", "short", "to a file"],
)
def test_a_bar_is_for_long_saves_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, total: int, shown: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with weights_bar(total, 2, "direct") as progress:
        progress(2 * GIB)  # of rank 0's half: half of all
    assert ("saving weights" in stream.getvalue()) is shown


def test_direct_is_not_called_slower() -> None:
    assert slower_line("direct", "every rank reads back what the others write") is None
