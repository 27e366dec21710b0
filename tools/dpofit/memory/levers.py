"""What can be changed about a job to save memory: LLaMA-Factory keys, DeepSpeed configs, cluster, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dpofit.memory.job import LIGER_MODEL_TYPES, Job
from dpofit.memory.predict import Prediction, expandable_segments
from dpofit.recipe.long_context import PIECES
from dpofit.train.longdpo.families import FAMILIES

# From what changes least to what changes most; suggestions are ranked by it first.
Kind = Literal["same", "cluster", "trains", "data", "method"]
KINDS: dict[Kind, str] = {
    "same": "the same training",
    "cluster": "more GPUs",
    "trains": "trains something else, or in another precision",
    "data": "cuts the data",
    "method": "another method",
}
OFFLOAD = {  # lever → file: the DeepSpeed configs that ship with the catalogue, from least to most offloaded
    "z2": "deepspeed/z2.json",
    "z3": "deepspeed/z3.json",
    "z2-offload": "deepspeed/z2_offload.json",
    "z3-offload-optimizer": "deepspeed/z3_offload_optimizer.json",
    "z3-offload": "deepspeed/z3_offload.json",
}
NEEDS_FLASH_ATTN = "needs the flash-attn package"
NEEDS_BITSANDBYTES = "needs the bitsandbytes package"


@dataclass(frozen=True, slots=True)
class Change:
    """One lever pulled. `overrides` are KEY=VALUE lines; of the levers of one `group` a job can have only one."""

    id: str
    kind: Kind
    group: str
    title: str
    overrides: tuple[str, ...] = ()
    remark: str = ""  # what it needs or costs beside memory and time
    nodes: int | None = None
    gpus_per_node: int | None = None
    prompt: int | None = None  # tokens of the longest prompt
    expandable: bool = False  # an environment variable, no key
    long_context: tuple[str, ...] = ()  # pieces that are on after it, the job's own included


def levers(base: Prediction) -> list[Change]:
    """Those that leave the training the same, or change what is trained; not cluster, length and method."""
    job = base.job
    return [*_activations(base), *_batches(job), *_sharding(job), *_saves(base), *_optimizer(job), *_precision(job)]


def loss_lever(job: Job) -> Change | None:
    """ORPO needs no reference: neither its weights nor its logits."""
    if not job.has_reference or job.recipe.stage != "dpo":
        return None
    remark = "ORPO is not DPO: no reference, another loss, its own learning rate and pref_beta"
    return Change("orpo", "method", "loss", "ORPO instead of DPO", ("pref_loss=orpo",), remark)


def nodes_lever(nodes: int, gpus_per_node: int) -> Change:
    """A larger cluster of the same kind of node."""
    title = f"{nodes} x {gpus_per_node} = {nodes * gpus_per_node} GPUs"
    return Change("nodes", "cluster", "cluster", title, nodes=nodes, gpus_per_node=gpus_per_node)


def length_lever(job: Job, prompt: int) -> Change:
    """Prompts cut to what fits."""
    row = prompt + max(job.lengths.chosen, job.lengths.rejected)
    remark = "longer rows lose their tail: answers their EOS, prompts the assistant header"
    return Change("cutoff", "data", "length", f"rows of {row:,} tokens", (f"cutoff_len={row}",), remark, prompt=prompt)


def pieces_lever(job: Job, pieces: Sequence[str]) -> Change:
    """Long-context pieces on, the job's own among them."""
    more = [piece for piece in pieces if piece not in job.recipe.long_context]
    instead = ("use_unsloth_gc=false",) if job.recipe.use_unsloth_gc and "offload_checkpoints" in pieces else ()
    title, remark = f"long-context {', '.join(more)}", "needs dpofit launch; llamafactory-cli runs stock"
    return Change("long-context", "same", "unsloth-gc", title, instead, remark, long_context=tuple(pieces))


def _activations(base: Prediction) -> list[Change]:
    job, recipe = base.job, base.job.recipe
    found = []
    if not recipe.gradient_checkpointing:
        override = ("disable_gradient_checkpointing=false",)
        found.append(Change("checkpointing", "same", "checkpointing", "gradient checkpointing back on", override))
    if not recipe.use_unsloth_gc:
        remark = "checkpoints go to pinned host memory that is never returned"
        found.append(Change("unsloth-gc", "same", "unsloth-gc", "checkpoints off the GPU", ("use_unsloth_gc=true",),
                            remark))  # fmt: skip
    elif base.host_verdict not in (None, "fits"):
        found.append(Change("no-unsloth-gc", "same", "unsloth-gc", "checkpoints stay on the GPU, off the host",
                            ("use_unsloth_gc=false",)))  # fmt: skip
    if pieces := _pieces(job):
        found.append(pieces_lever(job, pieces))
    if recipe.flash_attn not in ("fa2", "fa3") and job.cluster.gpu.bf16:  # FlashAttention-2 starts at Ampere, as bf16
        found.append(Change("fa2", "same", "attention", "FlashAttention-2, no mask of rows x columns",
                            ("flash_attn=fa2",), NEEDS_FLASH_ATTN))  # fmt: skip
    if recipe.flash_attn == "disabled":
        found.append(Change("sdpa", "same", "attention", "torch's fused attention", ("flash_attn=auto",)))
    if not recipe.liger and job.model.model_type in LIGER_MODEL_TYPES:
        found.append(Change("liger", "same", "liger", "Liger's kernels in the layers", ("enable_liger_kernel=true",),
                            "needs the liger-kernel package"))  # fmt: skip
    if not expandable_segments(job):
        found.append(Change("expandable-segments", "same", "allocator", "segments that grow", expandable=True))
    return found


def _pieces(job: Job) -> tuple[str, ...]:
    """Every long-context piece that can work in this job; none when all of them are on already."""
    recipe = job.recipe
    pair = recipe.stage == "dpo" and recipe.micro_batch == 1 and not (recipe.evaluates and recipe.eval_micro_batch > 1)
    can = {
        "answer_logps": recipe.stage in ("dpo", "kto", "sft"),
        "shared_prompt": pair and recipe.flash_attn in ("auto", "sdpa", "fa2") and job.model.sliding_window is None,
        "cached_reference": job.has_reference,
        "tiled_mlp": True,
        "offload_checkpoints": recipe.gradient_checkpointing and recipe.use_reentrant_gc,
    }
    pieces = tuple(piece for piece in PIECES if can[piece] or job.on(piece))
    known = job.model.model_type in FAMILIES and not recipe.use_unsloth and not recipe.shift_attn
    return pieces if known and set(pieces) != recipe.long_context else ()


def _batches(job: Job) -> list[Change]:
    recipe = job.recipe
    found = []
    for micro in sorted({1, recipe.micro_batch // 2} - {0, recipe.micro_batch}, reverse=True):
        if recipe.micro_batch % micro == 0:
            accumulation = recipe.gradient_accumulation * recipe.micro_batch // micro
            overrides = (f"per_device_train_batch_size={micro}", f"gradient_accumulation_steps={accumulation}")
            title = f"{micro} at a time, as many an update"
            found.append(Change(f"micro-batch-{micro}", "same", "batch", title, overrides))
    if recipe.evaluates and recipe.eval_micro_batch > 1:
        override = ("per_device_eval_batch_size=1",)
        found.append(Change("eval-batch", "same", "eval", "evaluation one at a time", override))
    return found


def _sharding(job: Job) -> list[Change]:
    """The DeepSpeed configs that share out or offload more than the job's, or the same with automatic buckets."""
    recipe = job.recipe
    at_most = {"z2": 2, "z3": 3, "z2-offload": 2, "z3-offload-optimizer": 3, "z3-offload": 3}
    titles = {
        "z2": "ZeRO-2: gradients and optimizer shared out", "z3": "ZeRO-3: weights shared out too",
        "z2-offload": "ZeRO-2, optimizer on the CPU", "z3-offload-optimizer": "ZeRO-3, optimizer on the CPU",
        "z3-offload": "ZeRO-3, optimizer and weights on the CPU",
    }  # fmt: skip
    found = []
    for name, file in OFFLOAD.items():
        offloads = "offload" in name
        stays = (job.world_size == 1 and not offloads) or job.zero_stage > at_most[name]
        if stays or (recipe.quantization_bit is not None and name.startswith("z3")):
            continue
        overrides = [f"deepspeed={file}"]
        if recipe.pure_bf16 and name.startswith("z3"):  # refused together, llamafactory 0.9.5 hparams/parser.py
            overrides += ["pure_bf16=false", "bf16=true"]
        if offloads and ("8bit" in recipe.optim or "paged" in recipe.optim):
            overrides.append("optim=adamw_torch")  # DeepSpeed's CPUAdam takes its place
        remark = "under torchrun on one GPU: FORCE_TORCHRUN=1, or dpofit launch" if job.world_size == 1 else ""
        found.append(Change(name, "same", "sharding", titles[name], tuple(overrides), remark))
    return found


def _saves(base: Prediction) -> list[Change]:
    recipe = base.job.recipe
    found: list[Change] = []
    if base.disk_verdict in (None, "fits") or not recipe.saves:
        return found
    if recipe.save_total_limit is not None and recipe.save_total_limit > 1:
        override = ("save_total_limit=1",)
        found.append(Change("fewer-checkpoints", "same", "rotation", "keep one checkpoint", override))
    if not recipe.save_only_model:
        override, remark = ("save_only_model=true",), "a run that stops starts over: no optimizer states to resume from"
        found.append(Change("save-only-model", "same", "saves", "checkpoints of weights alone", override, remark))
    return found


def _optimizer(job: Job) -> list[Change]:
    """Other AdamWs, where the update runs on the GPU."""
    optim, zero = job.recipe.optim, job.recipe.zero
    found: list[Change] = []
    if zero is not None and zero.offload_optimizer != "none":
        return found
    if optim == "adamw_torch":
        override = ("optim=adamw_torch_fused",)
        found.append(Change("fused-adam", "same", "optimizer", "AdamW without temporary copies", override))
    if "8bit" not in optim:
        found.append(Change("adam-8bit", "trains", "optimizer", "8-bit AdamW", ("optim=adamw_8bit",),
                            NEEDS_BITSANDBYTES))  # fmt: skip
    return found


def _precision(job: Job) -> list[Change]:
    """Fewer weights trained, or in fewer bits."""
    recipe = job.recipe
    found = []
    if recipe.zero is None and not recipe.pure_bf16 and job.cluster.gpu.bf16:
        overrides = ("pure_bf16=true", "bf16=false", *(("fp16=false",) if recipe.fp16 else ()))
        remark = "no fp32 master: small updates round away"
        found.append(Change("pure-bf16", "trains", "precision", "weights and states in bf16", overrides, remark))
    if recipe.finetuning != "lora":
        remark = "trains adapters; a learning rate about 10 times higher is usual"
        found.append(Change("lora", "trains", "tuning", "LoRA", ("finetuning_type=lora",), remark))
    if recipe.quantization_bit is None:
        overrides = ("finetuning_type=lora", "quantization_bit=4")
        overrides += ("deepspeed=null",) if job.zero_stage == 3 else ()
        found.append(Change("qlora", "trains", "tuning", "LoRA on a 4-bit base", overrides, NEEDS_BITSANDBYTES))
    return found
