"""Exact memory of a training step, recorded from the real LLaMA-Factory code on fake tensors; importing it is light."""

from dpofit.trace.job import substitutions_of, trace_job, trace_peaks

__all__ = ["substitutions_of", "trace_job", "trace_peaks"]
