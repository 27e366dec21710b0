"""Exact memory of a training step, recorded from the real LLaMA-Factory code on fake tensors; importing it is light."""

from dpofit.trace.job import trace_job, trace_with_notes

__all__ = ["trace_job", "trace_with_notes"]
