"""Peaks of a deep model from two shallow traces: every kind of moment grows by the same bytes with each layer.

A moment is told by its phase, step, operation, module (without the layer's number) and shape; the highest of each kind
is linear in the number of layers, and a phase's peak is the highest of its kinds at the depth asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dpofit.trace.request import TraceRequest
from dpofit.trace.step import TracedStep, trace_step

SHALLOW = (4, 5)  # the first and last layers differ from those between; two between are enough to see a step
_LAYER = re.compile(r"\blayers\.\d+\b")
Kind = tuple[str, int, str, str, tuple[int, ...]]
Peaks = Mapping[tuple[str, int], int]


def is_linear(request: TraceRequest) -> bool:
    """ZeRO-3 isn't: what its coordinator keeps depends on how many parameters come between two uses."""
    return request.deepspeed.get("zero_optimization", {}).get("stage", 0) < 3


def traced_peaks(request: TraceRequest, space: str = "gpu") -> Peaks:
    """Allocated bytes at the peak of each (phase, step), to the byte those of the full-depth trace."""
    if request.layers <= SHALLOW[1] or not is_linear(request):
        return peaks_of(trace_step(request), space)
    low, high = (_highest_of_kinds(trace_step(replace(request, layers=layers)), space) for layers in SHALLOW)
    peaks: dict[tuple[str, int], int] = {}
    for kind, value in high.items():
        step = (value - low.get(kind, value)) // (SHALLOW[1] - SHALLOW[0])
        deep = value + step * (request.layers - SHALLOW[1])
        key = kind[:2]
        peaks[key] = max(peaks.get(key, 0), deep)
    return peaks


def peaks_of(traced: TracedStep, space: str = "gpu") -> Peaks:
    """The same of one trace as it is."""
    peaks: dict[tuple[str, int], int] = {}
    for kind, value in _highest_of_kinds(traced, space).items():
        peaks[kind[:2]] = max(peaks.get(kind[:2], 0), value)
    return peaks


def _highest_of_kinds(traced: TracedStep, space: str) -> dict[Kind, int]:
    highest: dict[Kind, int] = {}
    live = 0
    for mark in traced.recorder.marks:
        if mark.space != space:
            continue
        live += mark.size_bytes
        if mark.size_bytes < 0:
            continue
        storage = traced.recorder.storages[mark.index]
        kind = (mark.phase, mark.step, storage.op, _LAYER.sub("layers.*", storage.module), storage.shape)
        if live > highest.get(kind, -1):
            highest[kind] = live
    return highest
