"""What a single log line carries besides its message: rank, time, progress; and how it is shown."""

from __future__ import annotations

import re

SHOWN_CHARACTERS = 400
SEARCHED_BYTES = 8192  # patterns look at no more of a line than this: time stays linear in the log

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]{0,512}(?:\x07|\x1b\\)?|[@-Z\\^_])")
_RANK = re.compile(
    rb"^\s*(?:\[rank(\d+)\]|\[default(\d+)\]:|(\d{1,5}): )|\[Rank (\d+)\]|\blocal_rank: (\d+)|\[PG [^\]]* Rank (\d+)\]"
)
_PROGRESS = re.compile(
    rb"(?:\[[\w-]+\]:\s*|[\w.-]+:\s)?\s*\d+%\|[^|]{0,400}\|\s*(\d+)/(\d+) \[\d[^\]]{0,60}(?:s/it|it/s)\]"
)
_TIME = re.compile(
    rb"(?P<iso>20\d\d-\d\d-\d\d)[ T](?P<isoclock>\d\d:\d\d:\d\d)(?:[.,](?P<isofraction>\d{1,6}))?"
    rb"|(?P<us>\d\d/\d\d/\d{4}) (?P<usclock>\d\d:\d\d:\d\d)"
    rb"|\b[IWEF](?P<glog>\d{4}) (?P<glogclock>\d\d:\d\d:\d\d)(?:\.(?P<glogfraction>\d{1,6}))?"
)


def plain(text: bytes) -> bytes:
    """The text without terminal escapes; line breaks stay."""
    return _ANSI.sub(b"", text) if b"\x1b" in text else text


def shown(line: bytes) -> str:
    """The line as evidence: text, one line, without control characters, at most SHOWN_CHARACTERS."""
    text = line[:SEARCHED_BYTES].decode("utf-8", "replace")
    text = "".join(character if character.isprintable() else " " for character in text).strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def rank_of(line: bytes) -> int | None:
    """The rank that the line names: torch `[rank3]:`, torchrun `[default3]:`, srun `3: `, NCCL `[Rank 3]`."""
    found = _RANK.search(line, 0, 400)
    if not found:
        return None
    return int(next(group for group in found.groups() if group is not None)[:9])


def time_of(text: bytes) -> str | None:
    """The last time stamp in the text as `MM-DD hh:mm:ss.ffffff` (glog has no year), comparable as text."""
    found = None
    for match in _TIME.finditer(text):
        found = match
    if found is None:
        return None
    if found["iso"]:
        day, clock, fraction = found["iso"][5:], found["isoclock"], found["isofraction"]
    elif found["us"]:
        day, clock, fraction = found["us"][:5].replace(b"/", b"-"), found["usclock"], None
    else:
        glog = found["glog"]
        day, clock, fraction = glog[:2] + b"-" + glog[2:], found["glogclock"], found["glogfraction"]
    return f"{day.decode()} {clock.decode()}.{(fraction or b'0').decode().ljust(6, '0')}"


def time_before(text: bytes) -> str | None:
    """The time stamp that the last stamped of the text's lines begins with."""
    for line in reversed(text.splitlines()[-16:]):
        if found := time_of(line[:120]):
            return found
    return None


def progress_of(text: bytes) -> tuple[int, int] | None:
    """(step, steps) of the last training bar in the text: tqdm without a name, counted in it/s or s/it."""
    end = text.rfind(b"|") + 512  # no bar without one, and what follows its last one is short
    if end < 512:
        return None
    for _ in range(8):  # the last bar may be another one: look a few further back
        end = max(text.rfind(b"s/it]", 0, end), text.rfind(b"it/s]", 0, end))
        if end < 0:
            return None
        start = max(text.rfind(b"\n", 0, end), text.rfind(b"\r", 0, end)) + 1
        if found := _PROGRESS.match(text[start : end + 5]):
            return int(found[1][:12]), int(found[2][:12])
    return None
