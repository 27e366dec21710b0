"""What the user can choose about the save guard, read from the environment once per run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from dpofit.errors import BadInput, Problem
from dpofit.units import GIB, MIB, parse_bytes

Backend = Literal["direct", "routed", "gather", "native-safe"]
Mode = Literal["auto", "direct", "routed", "gather", "native-safe", "off"]
OnFailure = Literal["continue", "stop"]

MIN_MEMORY_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """The guard's settings; `memory_bytes` caps the anonymous memory that a save adds to one rank."""

    mode: Mode = "auto"
    memory_bytes: int = 256 * MIB
    timeout_s: float = 1800.0  # how long ranks wait for the slowest one in each round
    on_failure: OnFailure = "continue"

    @property
    def chunk_bytes(self) -> int:
        """Bytes read, hashed and written at a time: a power of two (pinned blocks are rounded up to one), 8–64 MiB."""
        quarter = max(8 * MIB, min(64 * MIB, self.memory_bytes // 4))
        return 1 << (quarter.bit_length() - 1)

    @property
    def window_bytes(self) -> int:
        """Bytes written before they are sent to disk; at most three windows of a file are in the page cache."""
        return self.chunk_bytes


def read_config(environment: Mapping[str, str] | None = None) -> GuardConfig:
    """`DPOFIT_GUARD`, `_MEMORY`, `_TIMEOUT` (seconds) and `_ON_FAILURE`; BadInput names every bad one at once."""
    env = os.environ if environment is None else environment
    problems: list[Problem] = []

    def choice(name: str, choices: tuple[str, ...], default: str) -> str:
        value = env.get(name, default) or default
        if value not in choices:
            problems.append(Problem("environment", name, f"{value!r} is not a choice", f"Choose {', '.join(choices)}."))
            return default
        return value

    mode = choice("DPOFIT_GUARD", get_args(Mode), "auto")
    on_failure = choice("DPOFIT_GUARD_ON_FAILURE", get_args(OnFailure), "continue")
    memory_bytes = 256 * MIB
    if text := env.get("DPOFIT_GUARD_MEMORY"):
        try:
            memory_bytes = parse_bytes(text)
            if not MIN_MEMORY_BYTES <= memory_bytes <= 64 * GIB:
                raise ValueError(f"{text} is out of range; choose between 64MiB and 64GiB")
        except ValueError as error:
            problems.append(Problem("environment", "DPOFIT_GUARD_MEMORY", str(error), ""))
            memory_bytes = 256 * MIB
    timeout_s = 1800.0
    if text := env.get("DPOFIT_GUARD_TIMEOUT"):
        try:
            timeout_s = float(text)
            if not timeout_s > 0:
                raise ValueError
        except ValueError:
            problems.append(
                Problem("environment", "DPOFIT_GUARD_TIMEOUT", f"{text!r} is not a number of seconds", "Write 1800.")
            )
            timeout_s = 1800.0
    if problems:
        raise BadInput(problems)
    return GuardConfig(cast(Mode, mode), memory_bytes, timeout_s, cast(OnFailure, on_failure))
