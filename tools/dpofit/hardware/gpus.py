"""Turns what `--gpu` says into a Gpu: a card's name, an exact size, or `auto` for this machine."""

from __future__ import annotations

import re

from dpofit.errors import BadInput, Problem
from dpofit.hardware.cluster import Gpu
from dpofit.hardware.profiles import PROFILES, UNKNOWN_CARD_CONTEXT
from dpofit.units import GIB, format_gib, parse_bytes

_SMALLEST = GIB  # below this a size was surely meant in another unit


def find_gpu(name_or_size: str) -> Gpu:
    """The card called `a100-80g`, one of exactly `64GiB`, or (`auto`) the tightest of this machine.

    Case, spaces, underscores and `GB` for `g` do not matter. Raises BadInput with the nearest names.
    """
    text = name_or_size.strip()
    if text.lower() == "auto":
        from dpofit.hardware.nvml import read_this_machine

        return read_this_machine()[0]
    known = {profile.name: profile for profile in PROFILES}
    if _key(text) in known:
        return known[_key(text)]
    if re.fullmatch(r"[0-9.]+\s*[A-Za-z]+", text):
        return _exact(text)
    raise BadInput(Problem("command line", "--gpu", f"{name_or_size!r} is not a card dpofit knows", _remedy(text)))


def gpu_names() -> tuple[str, ...]:
    return tuple(profile.name for profile in PROFILES)


def _exact(text: str) -> Gpu:
    try:
        capacity_bytes = parse_bytes(text)
    except ValueError as error:
        raise BadInput(Problem("command line", "--gpu", str(error), "")) from None
    if capacity_bytes < _SMALLEST:
        raise BadInput(
            Problem("command line", "--gpu", f"{text!r} is less than 1 GiB", "Write the unit, such as 80GiB")
        )
    context_bytes, context_source = UNKNOWN_CARD_CONTEXT
    return Gpu(
        format_gib(capacity_bytes), capacity_bytes, f"given on the command line; {context_source}", context_bytes
    )


def _key(text: str) -> str:
    return re.sub(r"[\s_]+", "-", text.lower()).replace("gb", "g")


def _remedy(text: str) -> str:
    import difflib

    key = _key(text)
    nearest = [name for name in gpu_names() if key and key in name]
    nearest = nearest or difflib.get_close_matches(key, gpu_names(), n=3, cutoff=0.4)
    did_you_mean = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
    return f"{did_you_mean}Known: {' '.join(gpu_names())}; or a size such as 64GiB, or auto"
