"""Opens a log as a stream of byte blocks that end at a line break: plain, gzip, UTF-16 or standard input."""

from __future__ import annotations

import codecs
import gzip
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dpofit.errors import BadInput, Problem

BLOCK_BYTES = 256 << 10  # fits the second-level cache: measured fastest, and all the memory a log needs
LONGEST_LINE_BYTES = 1 << 20  # a longer one is cut there
_ARCHIVES = {
    rb"\xfd7zXZ\0": "xzcat",
    rb"BZh[1-9]1A": "bzcat",
    rb"\x28\xb5\x2f\xfd": "zstdcat",
    rb"PK\x03\x04": "unzip -p",
}


def open_log(name: str) -> BinaryIO:
    """The bytes of a log; `-` is standard input; gzip by its magic number, not its name.

    Raises BadInput when the file is missing, a folder, unreadable or an archive of another kind.
    """
    try:
        stream = sys.stdin.buffer if name == "-" else Path(name).open("rb")  # noqa: SIM115 the caller closes it
        magic = stream.peek(6)[:6]  # type: ignore[union-attr]  # a buffered reader; a pipe can't seek back
    except OSError as error:
        wrong = f"cannot read this log: {error.strerror or error}"
        raise BadInput(Problem(name, None, wrong, "Give a log file, or - for standard input")) from None
    if tool := next((tool for start, tool in _ARCHIVES.items() if re.match(start, magic)), None):
        right = f"Unpack it: {tool} LOG | dpofit doctor -; gzip needs no unpacking"
        raise BadInput(Problem(name, None, "is an archive, no text", right))
    return gzip.GzipFile(fileobj=stream) if magic[:2] == b"\x1f\x8b" else stream  # type: ignore[return-value]


def open_all(names: Sequence[str]) -> list[tuple[str, BinaryIO]]:
    """All logs, opened. Raises BadInput with every one that can't be, so that none is missed silently."""
    opened: list[tuple[str, BinaryIO]] = []
    problems: list[Problem] = []
    for name in names:
        try:
            opened.append((name, open_log(name)))
        except BadInput as bad:
            problems += bad.problems
    if problems:
        raise BadInput(problems)
    return opened


def blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines (\\n or \\r ends a line, as tqdm writes it), in order; the last may end without one.

    A torn gzip file gives what could be unpacked. UTF-16 (a PowerShell redirect) is turned into UTF-8.
    """
    rest = b""
    for piece in _as_utf8(_pieces(stream)):
        piece = rest + piece
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if cut == 0:
            if len(piece) < LONGEST_LINE_BYTES:
                rest = piece
                continue
            cut = len(piece)
        yield piece[:cut]
        rest = piece[cut:]
    if rest:
        yield rest


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of about BLOCK_BYTES; of a torn archive, what came out before it broke off."""
    piece, more = b"", True
    while more:
        try:
            part = stream.read1(BLOCK_BYTES)  # type: ignore[attr-defined]  # read() would lose all up to the tear
        except (EOFError, zlib.error, gzip.BadGzipFile):
            part = b""
        more = bool(part)
        piece += part
        if len(piece) >= BLOCK_BYTES or (piece and not more):
            yield piece
            piece = b""


def _as_utf8(pieces: Iterator[bytes]) -> Iterator[bytes]:
    first = next(pieces, b"")
    encoding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(first[:2])
    if encoding is None:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first[2:]).encode("utf-8", "replace")
    for piece in pieces:
        yield decoder.decode(piece).encode("utf-8", "replace")
