"""`python -m dpofit.trace`: trace one step and print its phases, and with --dump every storage."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from dpofit.trace.request import TraceRequest
from dpofit.trace.storages import Recorder, Storage

_SHAPES = {
    # name: (model_type, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied)
    "qwen2.5-72b": ("qwen2", 152064, 8192, 29568, 80, 64, 8, 128, False),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "llama3-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "mistral-7b": ("mistral", 32000, 4096, 14336, 32, 32, 8, 128, False),
    "tiny": ("qwen2", 1000, 64, 128, 2, 4, 2, 16, False),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpofit.trace")
    parser.add_argument("--model", choices=_SHAPES, default="tiny")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--stage", default="dpo")
    parser.add_argument("--loss", default="sigmoid")
    parser.add_argument("--finetuning", default="full")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target", default="all")
    parser.add_argument("--precision", default="deepspeed")
    parser.add_argument("--gc", default="reentrant")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--no-padding", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--deepspeed", help="a DeepSpeed JSON file")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw_torch_fused", help="a name of the Trainer's, or none")
    parser.add_argument("--dump", action="store_true", help="every storage above --floor, in order of birth")
    parser.add_argument("--floor", type=int, default=1 << 20, help="smallest storage shown, bytes")
    return parser


def main() -> None:
    options = _parser().parse_args()
    kind, vocab, hidden, inter, layers, heads, kv, dim, tied = _SHAPES[options.model]
    request = TraceRequest(
        model_type=kind, vocab_size=vocab, hidden_size=hidden, intermediate_size=inter, layers=layers, heads=heads,
        kv_heads=kv, head_dim=dim, tied_embeddings=tied, rows=options.rows, tokens=options.tokens,
        stage=options.stage, pref_loss=options.loss, finetuning=options.finetuning, lora_rank=options.rank,
        lora_target=tuple(options.target.split(",")), precision=options.precision, checkpointing=options.gc,
        liger=options.liger, attention=options.attention, padding=not options.no_padding,
        micro_batches=options.micro_batches, steps=options.steps,
        optimizer="" if options.optimizer == "none" else options.optimizer,
        deepspeed=json.loads(Path(options.deepspeed).read_text()) if options.deepspeed else {},
        world_size=options.world_size,
    )  # fmt: skip
    if options.layers:
        request = replace(request, layers=options.layers)
    from dpofit.trace.step import trace_step

    start = time.time()
    traced = trace_step(request)
    recorder = traced.recorder
    print(f"{len(recorder.storages):,} storages, {recorder.ops:,} operations, {time.time() - start:.1f} s")
    static = sum(s.size_bytes for s in recorder.storages if s.category.endswith("weights"))
    print(f"weights {static:,} B (subtracted below: activations only)")
    for step, phase in dict.fromkeys((mark.step, mark.phase) for mark in recorder.marks):
        peak, _ = recorder.peak(phase, step)
        host = [recorder.peak(phase, step, space)[0] for space in ("host_pinned", "host_pageable")]
        print(f"step {step} {phase:18} peak {peak:>16,} B, pinned {host[0]:>14,} B, pageable {host[1]:>14,} B")
    peak, at = recorder.peak()
    print(f"alive at the peak ({recorder.marks[at].phase}):")
    for storage in recorder.alive_at(at):
        if storage.size_bytes >= options.floor and not storage.category.endswith("weights"):
            _print(storage)
    _layer_peak(recorder, request.layers - 1)
    if options.dump:
        print("every storage:")
        for storage in recorder.storages:
            if storage.size_bytes >= options.floor and not storage.category.endswith("weights"):
                _print(storage)


def _layer_peak(recorder: Recorder, layer: int) -> None:
    """The highest point of the last layer's recompute and backward, without what was alive before it."""
    marks, storages = recorder.marks, recorder.storages
    starts = [
        i for i, m in enumerate(marks) if m.phase == "backward" and f"layers.{layer}." in storages[m.index].module
    ]
    ends = [i for i, m in enumerate(marks) if m.phase == "backward" and m.size_bytes > 0
            and f"layers.{layer - 1}." in storages[m.index].module]  # fmt: skip
    if not starts:
        return
    live = best = 0
    at = starts[0]
    for i in range(starts[0], ends[0] if ends else len(marks)):
        live += marks[i].size_bytes if marks[i].space == "gpu" else 0
        if live > best:
            best, at = live, i
    print(f"recompute + backward of layer {layer}: {best:,} B above what was alive at its start; alive there:")
    for storage in recorder.alive_at(at):
        if storage.size_bytes >= 1 << 20 and not storage.category.endswith("weights"):
            _print(storage)


def _print(s: Storage) -> None:
    died = "" if s.died is None else f"{s.died:>6} {s.died_phase[:9]:9} {s.used_by[:26]:26}"
    print(
        f"  {s.size_bytes:>14,} {s.dtype:9} {list(s.shape)!s:24} {s.op[:34]:34} {s.born:>6} {s.phase[:9]:9} -> "
        f"{died:43} {s.space if s.space != 'gpu' else ''} {s.module}"
    )


if __name__ == "__main__":
    main()
