"""Exact memory of a training step, recorded from the real LLaMA-Factory code on fake tensors."""
