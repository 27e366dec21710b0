"""The sum behind each figure at the peak, as arithmetic a reader can redo."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpofit.memory.disk import DiskUse
from dpofit.memory.host import PROCESS_BYTES
from dpofit.memory.job import Job
from dpofit.memory.layer_parts import kept_bytes
from dpofit.memory.pinned import pinned_block_bytes
from dpofit.memory.predict import Prediction
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.states import base_weight_bytes, quantized_layer_bytes
from dpofit.memory.zero import zero_sizes
from dpofit.train.longdpo import CHUNK_POSITIONS, SLAB_BYTES
from dpofit.units import format_gib


@dataclass(frozen=True, slots=True)
class Sum:
    """`figure` bytes are `arithmetic`; `exact` when the arithmetic is the whole of it."""

    what: str
    figure_bytes: int
    arithmetic: str


def explain(prediction: Prediction) -> list[Sum]:
    """One line for each category at the GPU's peak, then context, host and disk."""
    gpu, host = prediction.gpu, prediction.host
    job = prediction.job
    lines = [
        Sum(name, size_bytes, _gpu_sum(job, name, size_bytes, gpu.peak.phase))
        for name, size_bytes in sorted(gpu.peak.breakdown.items(), key=lambda item: -item[1])
    ]
    lines.append(Sum("allocated", gpu.allocated_bytes, f"sum of the above, in {gpu.peak.phase}"))
    mode = "on" if gpu.expandable else "off"
    gap = gpu.reserved.peak_bytes - gpu.allocated_bytes
    lines.append(
        Sum("reserved", gpu.reserved.peak_bytes,
            f"replay of the caching allocator, expandable segments {mode}: {format_gib(gap)} beside allocated")
    )  # fmt: skip
    lines.append(
        Sum("context", gpu.overhead.context_bytes,
            f"CUDA context and libraries, outside torch's allocator ({job.cluster.gpu.source.rpartition('; ')[2]})")
    )  # fmt: skip
    if gpu.overhead.communicators_bytes:
        lines.append(Sum("communicators", gpu.overhead.communicators_bytes, "NCCL, measured 0.5 to 1.6 GB"))
    lines += _host_sums(job, host.breakdown, host.peak_phase)
    return lines + _disk_sums(job, prediction.disk)


def _gpu_sum(job: Job, name: str, size_bytes: int, phase: str) -> str:
    model, n = job.model, job.world_size
    spec = job.layer_spec(job.eval_rows if phase == "eval" else job.rows, trained=True)
    parameters = f"{model.parameters:,} parameters"
    shard = f" / {n} ranks" if job.zero_stage == 3 else ""
    if name == "weights" and job.quantization is not None:
        layer_bytes, bits = quantized_layer_bytes(model, job.quantization), job.quantization.bits
        return f"{model.layers} layers x {layer_bytes:,} B in {bits} bits, the rest in bf16, and adapters"
    if name == "weights":
        own = job.own_trained_parameters
        width = job.trained_bytes if job.full else BF16
        others = f", {own:,} of them {job.trained_bytes} B" if own and job.autocast and not job.full else ""
        adapters = f" + {job.adapter_parameters:,} of adapters" if job.adapters else ""
        return f"{parameters}{adapters} x {width} B{others}{shard}"
    if name == "reference":
        return f"{parameters} x {BF16} B{shard}: the frozen copy DPO compares with"
    if name == "optimizer":
        share = f"{job.trained_parameters:,} trained" + (f" / {n} ranks" if job.zero_stage else "")
        master = 0 if job.recipe.zero is None and job.recipe.badam is None else FP32
        kept = size_bytes / max(job.trained_parameters / (n if job.zero_stage else 1), 1) - master
        return f"{share} x ({master} B master + {kept:.3g} B moments)"
    if name == "checkpoints":
        rows = f"{spec.rows} rows x {spec.tokens_per_row:,} tokens x {model.hidden_size:,}"
        if job.on("offload_checkpoints"):
            return f"inputs of the layers in hand, each {rows} x {spec.residual_bytes} B; the others are on the host"
        return f"{job.checkpointed_layers} layers x {rows} x {spec.residual_bytes} B, and the layer input in hand"
    if name == "logits":
        one = spec.tokens * model.vocab_size * FP32
        if job.on("answer_logps"):
            n = job.answer_tokens(spec.rows)
            return f"chunks of {min(n, CHUNK_POSITIONS):,} of {n:,} answer positions x {model.vocab_size:,} words"
        wide = f"{spec.rows} rows x {spec.tokens_per_row:,} tokens x {model.vocab_size:,} x 4 B"
        return f"{size_bytes / one:.2f} x one fp32 [{wide} = {format_gib(one)}]"
    if name == "gathered":
        return "bf16 weights gathered for use and ahead of it (ZeRO-3 fetch, prefetch, reuse), persistent ones"
    if name == "gradients":
        return "gradients waiting or accumulated" + (f", and their partition: 2 B a parameter{shard}" if shard else "")
    if name == "buckets":
        return f"reduce bucket of {zero_sizes(job).reduce_bucket:,} elements x 2 B, and copies of it"
    texts = {
        "activations": "what the layer or head at work has saved, operator by operator",
        "activation_grads": "gradients of activations in flight",
        "autocast_cache": "bf16 copies of fp32 weights that autocast keeps to the end of the forward",
        "attention_mask": f"bool [{spec.rows}, 1, T, T] mask and its bf16 bias, T = {spec.tokens_per_row:,}",
        "attention_scores": f"eager attention's [{spec.rows}, {model.heads}, T, T] scores",
        "optimizer_workspace": "fp32 gradients of one group and the optimizer's temporaries",
        "workspace": "temporaries inside kernels and expressions",
        "batch": "token ids, masks and labels as int64",
    }
    return texts.get(name, name.replace("_", " "))


def _host_sums(job: Job, breakdown: object, phase: str) -> list[Sum]:
    ranks = job.cluster.gpus_per_node
    share = math.ceil(job.trained_parameters / job.world_size)
    texts = {
        "processes": f"{ranks} ranks x {format_gib(PROCESS_BYTES)} of Python, torch and libraries, measured",
        "save_rank0": f"native save on rank 0: {job.model.parameters:,} parameters x {BF16} B",
        "save": f"native save, every rank: {_saved_bytes(job):,} B",
        "optimizer": f"{ranks} ranks x {share:,} elements x 12 B (fp32 master, two moments)",
        "gradients": f"{ranks} ranks x {share:,} elements x 6 B (fp32 and bf16 gradients), pinned blocks rounded up",
        "weights": f"{ranks} ranks x bf16 shards in pinned blocks, each rounded to a power of two",
        "reference": f"{ranks} ranks x the reference's bf16 shards, pinned tensor by tensor",
        "load": f"{ranks} ranks x what loading and init put on the host (ZeRO-1/2: weights and their flat copy)",
        "unsloth_gc": _unsloth_sum(job),
        "offload_checkpoints": _slabs_sum(job),
    }
    assert isinstance(breakdown, dict)
    return [
        Sum(
            f"host {name}",
            size_bytes,
            texts.get(name, name.replace("_", " ")) + (f" ({phase})" if name == "save" else ""),
        )
        for name, size_bytes in sorted(breakdown.items(), key=lambda item: -item[1])
        if size_bytes
    ]


def _saved_bytes(job: Job) -> int:
    return job.trained_parameters * FP32 if job.adapters else base_weight_bytes(job)


def _slabs_sum(job: Job) -> str:
    one = kept_bytes(job.rows * job.row_tokens * job.model.hidden_size * BF16)
    return (
        f"{job.cluster.gpus_per_node} ranks x {job.model.layers} layers x {format_gib(one)}, one after the other in "
        f"pinned slabs of {SLAB_BYTES / 2**20:.0f} MiB (the last one rounded up)"
    )


def _unsloth_sum(job: Job) -> str:
    block = job.rows * job.row_tokens * job.model.hidden_size * BF16
    return (
        f"{job.cluster.gpus_per_node} ranks x {job.model.layers} layers x {format_gib(pinned_block_bytes(block))} "
        f"(one checkpoint of {format_gib(block)}, rounded to a power of two)"
    )


def _disk_sums(job: Job, disk: DiskUse) -> list[Sum]:
    kept = job.recipe.save_total_limit
    weights = f"weights {format_gib(disk.weights_bytes)} + optimizer {format_gib(disk.optimizer_bytes)}"
    total = f"({kept} + 1) checkpoints + final weights" if kept else "one checkpoint + final weights"
    return [Sum("disk checkpoint", disk.checkpoint_bytes, weights), Sum("disk total", disk.total_bytes, total)]
