"""What the memory model covers; everything else in a recipe is refused by name, never guessed."""

from __future__ import annotations

from collections.abc import Iterator

from dpofit.errors import BadInput, Problem
from dpofit.memory.badam import badam_problems
from dpofit.memory.bands import names_to_freeze_by
from dpofit.memory.optimizers import OPTIMIZERS
from dpofit.memory.own_optimizers import own_optimizer_problems
from dpofit.memory.unsloth import unsloth_problems
from dpofit.models.shape import ModelShape
from dpofit.recipe.long_context import written
from dpofit.recipe.recipe import Recipe
from dpofit.train.longdpo.families import FAMILIES

STAGES = ("dpo", "kto", "rm", "sft")
FINETUNING = ("full", "freeze", "lora")
BESIDE_ADAPTERS = frozenset({"embed_tokens", "lm_head", "norm"})  # additional_target
_LOADED = {  # docs/not-modelled.md
    "hqq": "hqq, which transformers 5.5.4 can't load,",
    "eetq": "eetq, whose layers peft 0.18.1 doesn't take,",
}
LARGEST = 100_000  # batch or rank; more is a slip of the keyboard


def check_scope(recipe: Recipe, model: ModelShape, world_size: int = 1) -> None:
    """Raise BadInput naming every part of the recipe that is not modelled on so many GPUs."""
    where = str(recipe.source)
    gaps = [*_gaps(recipe, model), *unsloth_problems(recipe, model, world_size)]
    problems = [Problem(where, key, f"{wrong} is not modelled yet", right) for key, wrong, right in gaps]
    unknown = [t for t in recipe.lora_target if t != "all" and t not in {linear.name for linear in model.linears}]
    if recipe.finetuning == "lora" and unknown:
        names = ", ".join(dict.fromkeys(linear.name for linear in model.linears))
        wrong = f"{', '.join(unknown)}: no linear layer of {model.name} is called that"
        problems.append(Problem(where, "lora_target", wrong, f"It has: all, {names}"))
    problems += [Problem(where, *problem) for problem in own_optimizer_problems(recipe, model, world_size)]
    problems += [Problem(where, *problem) for problem in badam_problems(recipe, model, world_size)]
    if recipe.finetuning == "freeze":
        problems += [Problem(where, *problem) for problem in _freeze_problems(recipe, model)]
    problems += [Problem(where, *problem) for problem in _piece_problems(recipe, model)]
    if problems:
        raise BadInput(problems)


def _piece_problems(recipe: Recipe, model: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Long-context pieces that refuse this model when the run starts (dpofit.train.longdpo.combine)."""
    pieces = recipe.long_context & {"answer_logps", "shared_prompt", "tiled_mlp"}
    if pieces and model.model_type not in FAMILIES:
        right = f"Turn them off; known: {', '.join(FAMILIES)}"
        yield "long_context", f"{written(pieces)}: not for {model.name}, a {model.model_type}", right
    if "shared_prompt" in pieces and model.sliding_window is not None:
        wrong = f"shared_prompt: {model.name} attends in a sliding window of {model.sliding_window:,} tokens"
        yield "long_context", wrong, "Turn it off for this model"


def _freeze_problems(recipe: Recipe, model: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Names that LLaMA-Factory would not find, and a choice that leaves nothing to train."""
    inside, outside = names_to_freeze_by(model)
    for key, names, known in (
        ("freeze_trainable_modules", recipe.freeze_modules, ("all", *inside)),
        ("freeze_extra_modules", recipe.freeze_extra, outside),
    ):
        if unknown := [name for name in names if name not in known]:
            yield key, f"{', '.join(unknown)}: no module of {model.name} is called that", f"It has: {', '.join(known)}"
    if not recipe.freeze_layers and not recipe.freeze_extra:
        yield "freeze_trainable_layers", "0 layers and no extra module: nothing would be trained", "Give a number"


def _gaps(recipe: Recipe, model: ModelShape) -> list[tuple[str, str, str]]:
    """(key, what stands there, what is modelled) of each gap."""
    zero = recipe.zero
    sharded = zero is not None and zero.stage == 3
    modelled = {
        "stage": (recipe.stage not in STAGES, f"stage {recipe.stage}", f"Modelled: {', '.join(STAGES)}"),
        "finetuning_type": (
            recipe.finetuning not in FINETUNING, recipe.finetuning, f"Modelled: {', '.join(FINETUNING)}"),
        "optim": (recipe.optim not in OPTIMIZERS, recipe.optim, f"Modelled: {', '.join(OPTIMIZERS)}"),
        "shift_attn": (  # of others LLaMA-Factory says that it does nothing: model_utils/longlora.py:358
            recipe.shift_attn and model.model_type == "llama",
            "shift_attn of a Llama, which LLaMA-Factory 0.9.5 refuses from transformers 4.48 on,", "Leave it out"),
        "quantization_bit": (
            recipe.quantization_bit is not None and (
                recipe.quantization_method != "bnb" or recipe.quantization_bit not in (4, 8)),
            f"{recipe.quantization_bit} bits by {_LOADED.get(recipe.quantization_method, recipe.quantization_method)}",
            "Modelled: 4 and 8 bits by bnb"),
        "disable_gradient_checkpointing": (
            recipe.quantization_bit == 8 and not recipe.gradient_checkpointing,
            "an 8-bit base without gradient checkpointing", "Leave gradient checkpointing on"),
        "per_device_train_batch_size": (
            recipe.micro_batch > LARGEST, f"a batch of {recipe.micro_batch:,}", f"Modelled: up to {LARGEST:,}"),
        "per_device_eval_batch_size": (
            recipe.eval_micro_batch > LARGEST, f"a batch of {recipe.eval_micro_batch:,}",
            f"Modelled: up to {LARGEST:,}"),
        "lora_rank": (recipe.lora_rank > LARGEST, f"rank {recipe.lora_rank:,}", f"Modelled: up to {LARGEST:,}"),
        "use_dora": (
            recipe.use_dora and (recipe.quantization_bit is not None or (
                recipe.lora_dropout > 0 and recipe.stage not in ("dpo", "kto"))),
            "DoRA on a quantized base" if recipe.quantization_bit else "DoRA with dropout",
            "Modelled: DoRA on a 16-bit base, without lora_dropout where it is in force"),
        "additional_target": (
            bool(set(recipe.additional_target) - BESIDE_ADAPTERS) or (
                bool(recipe.additional_target) and zero is None and recipe.pure_bf16),
            "bf16 modules beside fp32 adapters" if recipe.pure_bf16 else ", ".join(recipe.additional_target),
            f"Modelled: {', '.join(sorted(BESIDE_ADAPTERS))}, with bf16: true"),
        "ref_model_adapters": (  # elsewhere they are merged into the reference: model/adapter.py:195-215
            bool(recipe.ref_model_adapters) and (sharded or recipe.ref_model_quantization_bit is not None),
            "adapters beside a quantized or partitioned reference", "Merge them into ref_model"),
        "ref_model_quantization_bit": (
            recipe.ref_model_quantization_bit is not None and (
                sharded or recipe.ref_model_quantization_bit not in (4, 8) or recipe.quantization_method != "bnb"),
            "a reference quantized so", "Modelled: 4 and 8 bits by bnb, not under ZeRO-3"),
        "upcast_layernorm": (
            recipe.upcast_layernorm and zero is None and (recipe.pure_bf16 or model.qk_norm),
            "fp32 norms in bf16 layers" if recipe.pure_bf16 else f"fp32 norms on the heads of {model.name}",
            "Leave it out"),
        "upcast_lmhead_output": (
            recipe.upcast_lmhead_output and recipe.stage == "rm", "upcast_lmhead_output of a reward model",
            "Leave it out"),
        "neat_packing": (
            recipe.neat_packing and model.model_type == "qwen", f"neat_packing of {model.name}", "packing is modelled"),
        "bf16": (
            not (recipe.bf16 or recipe.fp16 or recipe.pure_bf16) and (zero is not None or recipe.finetuning != "lora"),
            "training in fp32", "Set bf16: true (or fp16: true, pure_bf16: true)"),
    }  # fmt: skip
    if recipe.neat_packing and recipe.flash_attn in ("fa2", "fa3"):  # data/collator.py:527-528, an assertion
        for key, rows, counts in (
            ("per_device_train_batch_size", recipe.micro_batch, True),
            ("per_device_eval_batch_size", recipe.eval_micro_batch, recipe.evaluates),
        ):
            if counts and rows > 1:
                packed = f"{rows} packed rows at once, which LLaMA-Factory refuses with FlashAttention-2,"
                modelled[key] = (True, packed, "Set it to 1")
    gaps = [(key, wrong, right) for key, (missing, wrong, right) in modelled.items() if missing]
    if zero is not None:
        if zero.stage < 2 and zero.grad_accum_dtype not in (None, "bf16", "fp16"):
            # engine.py _do_optimizer_sanity_check: DeepSpeed then runs its BF16_Optimizer, another engine
            wrong = f"{zero.grad_accum_dtype} gradients at stage {zero.stage}"
            gaps.append(("deepspeed", wrong, "Leave data_types.grad_accum_dtype out, or use stage 2 or 3"))
        if "nvme" in (zero.offload_optimizer, zero.offload_param):
            gaps.append(("deepspeed", "offload to NVMe", "Modelled: offload to cpu"))
        if zero.stage == 3 and recipe.additional_target:
            # peft 0.18.1's wrapper answers for its module's attributes, and deepspeed 0.18.4's hooks then fail:
            # 'Linear' object has no attribute 'ds_grads_remaining' (parameter_offload.py:448; seen in the tracer)
            gaps.append(("additional_target", "whole modules beside LoRA under ZeRO-3, where DeepSpeed's hooks fail on "
                         "peft's wrapper", "Use ZeRO-2"))  # fmt: skip
        if zero.stage == 3 and recipe.quantization_bit:
            gaps.append(("quantization_bit", "a quantized base under ZeRO-3", "Modelled: without DeepSpeed, ZeRO-1/2"))
    if recipe.optim == "adagrad" and zero is not None and zero.offload_optimizer == "cpu":
        # deepspeed 0.18.4 engine.py:1497-1502 raises ZeRORuntimeException for all but CPUAdam and CPULion
        gaps.append(("optim", "adagrad with an offloaded optimizer, which DeepSpeed refuses", "Set optim: adamw_torch"))
    return gaps + [(key, key, "Leave it at its default") for key in recipe.unmodelled]
