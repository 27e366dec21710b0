"""Where watching operations on fake tensors differs from the card, what is done about it, and how that is known."""

from __future__ import annotations

from typing import NamedTuple


class Distortion(NamedTuple):
    what: str
    correction: str
    known_from: str


DISTORTIONS = (
    Distortion(
        "gather's backward scatters out of place for tensor subclasses: one vocabulary-wide tensor too many",
        "scatter_add runs in place (storages.py)",
        "measured: tests/trace/test_against_profiler.py, dpo",
    ),
    Distortion(
        "the engine never adds gradients in place for tensor subclasses: one gradient too many at every sum",
        "added in place when the engine holds the last reference, counted as a fake tensor counts (kernels.py)",
        "measured: tests/trace/test_against_profiler.py; source: torch autograd/input_buffer.cpp",
    ),
    Distortion(
        "softmax and log-softmax copy an input that isn't contiguous, inside the kernel",
        "a workspace beside the output (kernels.py)",
        "measured on the CPU: tests/trace/test_against_profiler.py; source for CUDA: ATen SoftMax.cu",
    ),
    Distortion(
        "attention backward kernels keep fp32 accumulators and, with grouped keys, gradients per query head",
        "a workspace beside the outputs (kernels.py)",
        "source: flash-attn 2 flash_api.cpp, ATen attention_backward.cu; not measured",
    ),
    Distortion(
        "the embedding's backward sorts tokens and keeps fp32 partial rows, as many as tokens differ",
        "a workspace for the most there can be (kernels.py)",
        "source: ATen Embedding.cu; not measured",
    ),
    Distortion(
        "`nonzero`, `.item()`, `torch.equal` need values",
        "every position counts; lengths are the longest (storages.py)",
        "by construction: the largest a batch of this shape can be",
    ),
    Distortion(
        "what dies in a reference cycle dies when Python's collector runs",
        "the collector is off: it stays (step.py)",
        "by construction: an upper bound",
    ),
    Distortion(
        "memory used by another stream is given back later (record_stream), streams have pools of their own",
        "not represented: one stream",
        "with overlap_comm the replay of the closed form has the pools",
    ),
)
