"""What a run of one's own showed about a cluster, as `dpofit calibrate` stores it and `--calibration` reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.units import GIB

SCHEMA = "dpofit.calibration/1"
_REMEDY = "Give a file that `dpofit calibrate RUN_DIR` wrote"


@dataclass(frozen=True, slots=True)
class Context:
    """What a rank holds of its card beside reserved bytes: CUDA context, libraries and, with several ranks,
    communicators. From the rank that holds least to the one that holds most."""

    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one cluster, from a run of `world_size` ranks. None: the run could not show it.

    Errors are measured over predicted, less one; `reserved_error` is the fragmentation that the allocator's replay did
    not see.
    """

    run: str
    gpu: str
    world_size: int
    context: Context | None
    allocated_error: float | None
    reserved_error: float | None

    @property
    def holds_something(self) -> bool:
        return any(value is not None for value in (self.context, self.allocated_error, self.reserved_error))

    def context_for(self, world_size: int) -> Context | None:
        """The context that a job of `world_size` ranks has too: one rank has no communicators."""
        return None if world_size == 1 < self.world_size else self.context

    def says(self, world_size: int) -> str:
        """What of it a job of `world_size` ranks uses, in words."""
        parts = []
        if context := self.context_for(world_size):
            what = "context" if self.world_size == 1 else "context and communicators"
            parts.append(f"{what} {context.low_bytes / GIB:.2f} to {context.high_bytes / GIB:.2f} GiB")
        for name, error in (("allocated", self.allocated_error), ("reserved", self.reserved_error)):
            if error is not None:
                parts.append(f"{name} {error:+.1%} of what was predicted")
        return "; ".join(parts) or "nothing that a job of one rank has too"


def calibration_text(calibration: Calibration) -> str:
    """The file."""
    return json.dumps({"schema": SCHEMA, **asdict(calibration)}, indent=2) + "\n"


def read_calibration(path: Path) -> Calibration:
    """The file's constants; BadInput when it is no calibration."""

    def problem(wrong: str) -> BadInput:
        return BadInput(Problem(str(path), "--calibration", wrong, _REMEDY))

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise problem(f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise problem("is not JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise problem(f"is not a {SCHEMA}")
    context = document.get("context")
    right = {
        "run": isinstance(document.get("run"), str),
        "gpu": isinstance(document.get("gpu"), str),
        "world_size": type(document.get("world_size")) is int and document["world_size"] >= 1,
        "context": context is None or (isinstance(context, dict) and _is_context(context)),
        "allocated_error": _is_error(document.get("allocated_error")),
        "reserved_error": _is_error(document.get("reserved_error")),
    }
    if wrong := [name for name, fits in right.items() if not fits]:
        raise problem(f"has no usable {', '.join(wrong)}")
    return Calibration(
        run=document["run"],
        gpu=document["gpu"],
        world_size=document["world_size"],
        context=Context(**context) if context else None,
        allocated_error=document.get("allocated_error"),
        reserved_error=document.get("reserved_error"),
    )


def _is_context(context: dict[str, object]) -> bool:
    low, high = context.get("low_bytes"), context.get("high_bytes")
    return set(context) == {"low_bytes", "high_bytes"} and type(low) is type(high) is int and 0 <= low <= high  # type: ignore[operator]


def _is_error(value: object) -> bool:
    return value is None or (type(value) in (int, float) and -1 < value < 100)  # type: ignore[operator]
