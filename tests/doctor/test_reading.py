"""Logs as they come: gzip, pipes, torn, coloured, glued, UTF-16, in any block size."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
from pathlib import Path

import pytest

from dpofit.doctor import read as reading
from dpofit.doctor.diagnose import diagnose
from dpofit.doctor.read import open_log
from dpofit.errors import BadInput
from tests.doctor.conftest import ids, read

OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.76 GiB. GPU 3 has a total\n"
BARS = "".join(f"\r {step:3d}%|####      | {step}/100 [10:00<90:00,  1.20s/it]" for step in range(41))


def test_gzip_by_content_not_by_name(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(gzip.compress(b"dull\n" * 1000 + OOM.encode()))
    assert diagnose([str(log)]).findings[0].evidence[0].where == f"{log}:1001"


def test_a_torn_gzip_file_gives_what_it_holds(tmp_path: Path) -> None:
    whole = gzip.compress(OOM.encode() + os.urandom(20_000).hex().encode())
    (tmp_path / "torn.gz").write_bytes(whole[: len(whole) // 2])
    assert [finding.id for finding in diagnose([str(tmp_path / "torn.gz")]).findings] == ["memory.gpu-oom"]


def test_a_pipe_is_read_from_its_first_byte(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(OOM.encode())))
    writer.start()
    try:
        assert [finding.id for finding in diagnose([str(pipe)]).findings] == ["memory.gpu-oom"]
    finally:
        writer.join()


def test_every_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(OOM)
    with pytest.raises(BadInput) as refused:
        diagnose([str(tmp_path / "good.log"), str(tmp_path / "gone.log"), str(tmp_path)])
    assert [problem.where for problem in refused.value.problems] == [str(tmp_path / "gone.log"), str(tmp_path)]


@pytest.mark.parametrize(
    ("start", "tool"),
    [
        (lzma.compress(b"a"), "xzcat"),
        (bz2.compress(b"a"), "bzcat"),
        (b"\x28\xb5\x2f\xfd\0", "zstdcat"),
        (b"PK\3\4", "unzip"),
    ],
)
def test_an_archive_is_not_called_a_log_without_a_cause(tmp_path: Path, start: bytes, tool: str) -> None:
    (tmp_path / "train.log").write_bytes(start)
    with pytest.raises(BadInput, match=f"is an archive, no text. Unpack it: {tool}"):
        open_log(str(tmp_path / "train.log"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_with_a_mark(encoding: str) -> None:
    assert ids(("\ufeff" + OOM).encode(encoding)) == ["memory.gpu-oom"]


def test_mixed_encodings_do_not_hide_a_line() -> None:
    assert ids("模型\n".encode("gbk") + b"\xff\xfe\x00\n" + OOM.encode()) == ["memory.gpu-oom"]


def test_terminal_colours_inside_the_message() -> None:
    report = read(OOM.replace("8.76", "\x1b[1;36m8.76\x1b[0m").replace("[rank3]:", "\x1b[36m[rank3]:\x1b[0m"))
    assert "8.76 GiB wanted" in report.findings[0].title
    assert "\x1b" not in report.findings[0].evidence[0].text


def test_windows_line_ends() -> None:
    assert read("a\r\nb\r\n" + OOM.replace("\n", "\r\n")).findings[0].evidence[0].where == "node-0.log:3"


def test_a_message_behind_a_progress_bar_on_the_same_line() -> None:
    report = read("first\n" + BARS + OOM)
    assert report.findings[0].evidence[0].where == "node-0.log:2"
    assert "at step 40 of 100" in report.findings[0].title


def test_a_message_broken_by_a_line_break() -> None:
    assert ids(OOM.replace("out of memory", "out of mem\nory")) == ["memory.gpu-oom"]
    assert ids(OOM.replace("out of memory", "out of\nmemory")) == ["memory.gpu-oom"]


def test_two_messages_glued_together() -> None:
    assert ids(OOM.rstrip("\n") + "[rank1]: Traceback (most recent call last):\n") == ["memory.gpu-oom"]


def test_a_log_without_a_last_line_break() -> None:
    assert ids("x\n" + OOM.rstrip("\n")) == ["memory.gpu-oom"]


def test_ranks_mixed_line_by_line() -> None:
    other = ['[rank0]:   File "a.py", line 1, in f\n', "[rank0]:     x = y()\n", "[rank0]: KeyError: 'z'\n"]
    mixed = "".join(line for pair in zip(other, ["[rank3]: Traceback\n", OOM, ""], strict=True) for line in pair)
    assert ids(mixed) == ["memory.gpu-oom"]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_the_block_size_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "head\n" * 5 + BARS + "\n" + "[INFO] x\n" * 30 + OOM + "tail\n"
    whole = read(log)
    monkeypatch.setattr(reading, "BLOCK_BYTES", size)
    assert read(log).findings == whole.findings
    assert b"".join(reading.blocks(io.BytesIO(log.encode()))) == log.encode()


def test_a_line_without_end_is_cut_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 10_000)
    pieces = list(reading.blocks(io.BytesIO(b"x" * 2_000_000)))
    assert max(map(len, pieces)) <= 10_000 + reading.BLOCK_BYTES
    assert sum(map(len, pieces)) == 2_000_000
