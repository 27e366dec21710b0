"""How long a step takes, relative to other recipes: from FLOPs, PCIe bytes and collective bytes. An estimate, no more.

Absolute seconds come out too, since GPU-hours need them; every assumed rate stands below.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.memory.job import Job
from dpofit.memory.spec import BF16, FP32

ASSUMED_TFLOPS = 312.0  # cards whose speed is not known (an exact --gpu SIZE): as an A100
ASSUMED_PCIE_GB_PER_S = 31.5
EFFICIENCY = 0.45  # of the dense peak, assumed
NODE_GB_PER_S = 200.0  # collectives inside a node, per GPU, assumed (NVLink)
NETWORK_GB_PER_S = 25.0  # between nodes, per GPU, assumed (one 200 Gb/s card a GPU)
CPU_ADAM_BYTES_PER_S = 20e9  # memory traffic of DeepSpeed's CPUAdam, per rank, assumed


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and what they are made of. Of compute and what runs beside it (collectives,
    offload_checkpoints' copies on a stream of their own) the longest counts."""

    compute_s: float
    collectives_s: float
    pcie_s: float
    optimizer_s: float
    copies_beside_s: float
    pairs: int  # pairs (or rows, in SFT) of one optimizer step over all ranks

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.collectives_s, self.copies_beside_s) + self.pcie_s + self.optimizer_s

    @property
    def seconds_per_pair(self) -> float:
        return self.step_s / self.pairs


def step_time(job: Job) -> StepTime:
    """One optimizer step: gradient_accumulation micro-batches, then the update."""
    recipe, model, gpu = job.recipe, job.model, job.cluster.gpu
    micro = recipe.gradient_accumulation
    tokens = job.rows * job.row_tokens
    layers = forward_flops(job)
    answers = job.on("answer_logps")
    head = 2 * model.embedding_parameters * (job.answer_tokens(job.rows) if answers else job.collated_tokens(job.rows))
    forward = layers + head
    own = job.own_trained_parameters / job.model.parameters  # frozen weights need no gradient of their own
    backward = forward * (1.1 + 0.9 * own)
    recompute = layers * job.checkpointed_layers / model.layers + (head if answers else 0)
    forwards = job.passes * (1 + reference_forwards(job))  # KTO's second forwards too
    flops = micro * (forward * forwards + backward + recompute)
    rate = (gpu.bf16_tflops or ASSUMED_TFLOPS) * 1e12 * EFFICIENCY
    wire = (NETWORK_GB_PER_S if job.cluster.nodes > 1 else NODE_GB_PER_S) * 1e9
    pcie = (gpu.pcie_gb_per_s or ASSUMED_PCIE_GB_PER_S) * 1e9
    share = job.trained_parameters / job.world_size
    return StepTime(
        compute_s=flops / rate,
        collectives_s=_collective_bytes(job, micro) / wire,
        pcie_s=_pcie_bytes(job, micro, tokens, share) / pcie,
        copies_beside_s=_checkpoint_bytes(job, micro, tokens) / pcie if job.on("offload_checkpoints") else 0.0,
        optimizer_s=_optimizer_seconds(job, share),
        pairs=recipe.micro_batch * micro * job.world_size,
    )


def forward_flops(job: Job) -> float:
    """Of one micro-batch's decoder layers, forward; causal attention counts the pairs it looks at."""
    model, row = job.model, job.shared
    matmul = 2 * model.layers * sum(x.in_features * x.out_features for x in model.linears)
    looked_at = job.rows * job.row_tokens**2 / 2
    if row is not None:
        looked_at = job.rows * (row.first**2 / 2 + row.rejected * row.prompt + row.rejected**2 / 2)
    return job.rows * job.row_tokens * matmul + 4 * model.layers * model.heads * model.head_dim * looked_at


def reference_forwards(job: Job) -> float:
    """Reference forwards a micro-batch: with cached_reference one for each pair of the data, shared out over epochs."""
    if not job.has_reference or job.reference_in_step:
        return float(job.has_reference)
    return 1 / max(float(job.recipe.settings.get("num_train_epochs") or 3.0), 1.0)  # transformers' default is 3


def _checkpoint_bytes(job: Job, micro: int, tokens: int) -> float:
    return micro * 2 * job.checkpointed_layers * tokens * job.model.hidden_size * BF16


def _collective_bytes(job: Job, micro: int) -> float:
    """Bytes each GPU receives. ZeRO-3: a gather in forward, recompute and backward, one for the reference, and the
    gradients' reduce-scatter, every micro-batch; else gradients once a step (and updated weights, ZeRO-1/2)."""
    if job.world_size == 1:
        return 0.0
    weights = job.model.parameters * BF16
    gradients = job.trained_parameters * BF16
    if job.zero_stage == 3:
        passes = 2 + job.recipe.gradient_checkpointing + reference_forwards(job)
        return float(micro * (passes * weights + gradients))
    if job.zero_stage == 2:
        return float(micro * gradients + gradients)
    return 2.0 * gradients * (1 if job.zero_stage else job.trained_bytes / BF16)


def _pcie_bytes(job: Job, micro: int, tokens: int, share: float) -> float:
    total = 0.0
    zero = job.recipe.zero
    if zero is not None and zero.offload_param == "cpu":
        total += micro * (3 + reference_forwards(job)) * job.model.parameters / job.world_size * BF16
    if zero is not None and zero.offload_optimizer == "cpu":
        total += share * (micro * BF16 + FP32 + BF16)
    if job.recipe.use_unsloth_gc and job.recipe.gradient_checkpointing:
        total += _checkpoint_bytes(job, micro, tokens)
    return total


def _optimizer_seconds(job: Job, share: float) -> float:
    zero = job.recipe.zero
    if zero is not None and zero.offload_optimizer == "cpu":
        return share * 7 * FP32 / CPU_ADAM_BYTES_PER_S  # reads p, m, v, g; writes p, m, v
    return 0.0
