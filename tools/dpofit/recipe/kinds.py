"""Every kind of configuration finding: its stable id, how bad it is, and why (docs/checks.md is generated from this).

`refuses` kinds are bad input: the file cannot be read as a LLaMA-Factory run at all, so every command exits 2.
`error` kinds will really fail when LLaMA-Factory (pinned) runs the recipe; planning refuses them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.findings import Severity


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding: severity, whether it is bad input (exit 2), and the cause in one or two sentences."""

    severity: Severity
    why: str
    refuses: bool = False


def _refused(why: str) -> Kind:
    return Kind("error", why, refuses=True)


def _error(why: str) -> Kind:
    return Kind("error", why)


def _warning(why: str) -> Kind:
    return Kind("warning", why)


def _info(why: str) -> Kind:
    return Kind("info", why)


KINDS: dict[str, Kind] = {
    # the file itself
    "config.unknown-key": _refused(
        "LLaMA-Factory refuses a file with a key none of its arguments has (unless ALLOW_EXTRA_ARGS=1, which "
        "drops the key silently)."
    ),
    "config.other-format": _refused(
        "The file belongs to another program, or to LLaMA-Factory's experimental v1 format."
    ),
    "config.wrong-type": _refused(
        "Nothing converts or checks a YAML's values before they are used: a wrong type fails minutes later, "
        'or is taken for something else (the text "false" counts as true).'
    ),
    "config.invalid-choice": _refused("The key takes only the values listed."),
    "config.out-of-range": _refused("A number that no run can use, such as a batch of 0."),
    "config.missing-value": _refused("`???` marks a value that someone must still fill in."),
    "config.interpolation": _refused(
        "An OmegaConf `${}` that points nowhere, at itself, or at a resolver that dpofit does not read."
    ),
    "config.no-model": _refused("LLaMA-Factory stops without `model_name_or_path`."),
    "config.environment": _refused(
        "A run folder's dpofit.yaml may set only NCCL_*, PYTORCH_*, TORCH_*, OMP_NUM_THREADS, CUDA_*, DS_*, "
        "DPOFIT_*, OPTIM_TORCH and UNSLOTH_BLOCK_COMPILE, each to one value."
    ),
    "config.long-context-piece": _refused(
        "A long-context piece that is named in `--long-context`, DPOFIT_LONG_CONTEXT or dpofit.yaml and that dpofit "
        "does not have, or that is switched to something else than true or false."
    ),
    "config.deepspeed-file": _refused("The DeepSpeed config is missing or is not readable JSON."),
    "config.deepspeed-key": _refused(
        "DeepSpeed's ZeRO settings forbid keys they do not know (pydantic `extra=forbid`): the engine stops at start."
    ),
    "config.deepspeed-value": _refused("A DeepSpeed setting has a value of the wrong type or out of range."),
    # what LLaMA-Factory or transformers refuses after reading the file
    "config.pure-bf16-zero3": _error("`pure_bf16` is refused under ZeRO-3, which keeps fp32 master weights itself."),
    "config.unsloth-zero3": _error(
        "`use_unsloth` is refused under ZeRO-3. `use_unsloth_gc` is something else and works there."
    ),
    "config.kt-zero3": _error("KTransformers is refused under ZeRO-3."),
    "config.pissa-zero3": _error("PiSSA initialisation is refused under ZeRO-3."),
    "config.pissa-stage": _error("`pissa_init` is refused for ppo, kto and any loss that needs a reference model."),
    "config.pissa-quantized": _error("PiSSA cannot be initialised on a quantized model."),
    "config.quantization-method": _error(
        "On-the-fly quantization is accepted only with `finetuning_type: lora` or `oft`."
    ),
    "config.quantization-bits": _error("The quantization method does not offer this number of bits."),
    "config.quantization-zero3": _error("Under ZeRO-3 only 4-bit bitsandbytes is accepted."),
    "config.quantization-vocab": _error("The embeddings of a quantized model cannot be resized."),
    "config.quantization-adapter": _error("A quantized model takes exactly one adapter, and no new one on top of it."),
    "config.quantization-device-map": _error("`quantization_device_map: auto` is for inference only."),
    "config.quantization-fp8": _error("`fp8` and `quantization_bit` exclude each other."),
    "config.adapter-method": _error("`adapter_name_or_path` is accepted only with `finetuning_type: lora`."),
    "config.lora-only": _error("The key belongs to LoRA; with another `finetuning_type` LLaMA-Factory stops."),
    "config.llama-pro-full": _error("`use_llama_pro` needs `finetuning_type: freeze` or `lora`."),
    "config.block-optimizer": _error(
        "GaLore, APOLLO and BAdam exclude LoRA and each other; GaLore and APOLLO exclude DeepSpeed."
    ),
    "config.reference-bits": _error("Reference and reward models are quantized to 4 or 8 bits only."),
    "config.label-smoothing-loss": _error("`dpo_label_smoothing` is accepted only with `pref_loss: sigmoid`."),
    "config.sft-only": _error("The key is accepted only with `stage: sft`."),
    "config.no-dataset": _error("Training without `dataset` is refused."),
    "config.no-eval-data": _error("Evaluation is asked for, but neither `eval_dataset` nor `val_size` gives it data."),
    "config.eval-data-twice": _error(
        "`val_size` splits `dataset`; it is refused without one, and next to `eval_dataset`."
    ),
    "config.streaming": _error("Streaming needs `max_steps`, a whole `val_size`, and no `max_samples`."),
    "config.mixing": _error("`interleave_probs` needs an interleaving `mix_strategy` and one number for each dataset."),
    "config.mask-history": _error("`mask_history` and `train_on_prompt` exclude each other."),
    "config.predict-with-generate": _error(
        "`predict_with_generate` excludes ZeRO-3 and `compute_accuracy`, and sft prediction needs it."
    ),
    "config.reward-model": _error(
        "ppo needs `reward_model`, and a reward model of a kind that matches `finetuning_type`."
    ),
    "config.ppo": _error("ppo trains only, and excludes `shift_attn`."),
    "config.load-best": _error(
        "`load_best_model_at_end` is refused for rm and ppo, and needs `save_strategy` and `eval_strategy` to"
        " match, with `save_steps` a multiple of `eval_steps`."
    ),
    "config.long-context": _error(
        "A long-context piece that is on (docs/long-context.md) can't work in this run: what it computes would not be "
        "what LLaMA-Factory computes, or there is nothing for it to do."
    ),
    "config.auto-batch-zero3": _error("`auto_find_batch_size` is refused under ZeRO-3."),
    "config.precision-twice": _error("`bf16` and `fp16` exclude each other (for evaluation too)."),
    "config.scheduler-needs-eval": _error("`reduce_lr_on_plateau` and `greedy` need an `eval_strategy`."),
    "config.steps": _error("A step count that transformers refuses: zero, or a fraction above one."),
    "config.prefetch-without-workers": _error("`dataloader_prefetch_factor` needs `dataloader_num_workers` above 0."),
    "config.inference-backend": _error("Training accepts only `infer_backend: huggingface`."),
    "config.pixels": _error("A maximum number of pixels below the minimum."),
    "config.export-dataset": _error("`export_quantization_bit` needs `export_quantization_dataset`."),
    "config.trackio-project": _error("Reporting to trackio needs `project`."),
    "config.flash-attn-fa3": _error(
        "LLaMA-Factory 0.9.5 lists `fa3` as a choice but implements it for gpt-oss alone; any other model "
        "stops with `Unknown attention type`."
    ),
    "config.deepspeed-mismatch": _error(
        "transformers stops when a number in the DeepSpeed JSON differs from the recipe's own."
    ),
    "config.partial-offload-stage": _error("`offload_optimizer.ratio` below 1 is accepted only at stage 3."),
    "config.dataset-not-ranked": _error(
        "dpo and rm accept only datasets whose dataset_info.json entry has `ranking: true`; sft, pt and kto "
        "only others."
    ),
    "config.dataset-unknown": _error(
        "Every name in `dataset` and `eval_dataset` must be an entry of dataset_info.json."
    ),
    # what surprises people
    "config.text-for-switch": _warning(
        'Text is not converted: any text counts as true, and only "true"-like text says what it does.'
    ),
    "config.interpolation-unresolved": _warning(
        "dpofit resolves `${}`. Plain llamafactory-cli does not (it converts with resolve=False) and takes "
        "the literal text."
    ),
    "config.gradient-checkpointing-on": _info(
        "LLaMA-Factory turns gradient checkpointing on unless `disable_gradient_checkpointing` is true; "
        "`gradient_checkpointing: true` saves nothing more."
    ),
    "config.gradient-checkpointing-back": _warning(
        "With `disable_gradient_checkpointing: true`, transformers' own `gradient_checkpointing: true` turns "
        "it on again, non-reentrant and without `use_unsloth_gc`."
    ),
    "config.gradient-checkpointing-reentrant": _warning(
        "`gradient_checkpointing: true` makes the trainer enable checkpointing a second time, reentrant, "
        "which undoes `use_reentrant_gc: false`."
    ),
    "config.gradient-checkpointing-kwargs": _warning(
        "`gradient_checkpointing_kwargs` is read only when `gradient_checkpointing: true`."
    ),
    "config.unsloth-gc-off": _warning("`use_unsloth_gc` does nothing when gradient checkpointing is disabled."),
    "config.unsloth-is-not-unsloth-gc": _info(
        "`use_unsloth` needs the unsloth package and replaces the model's code; `use_unsloth_gc` is LLaMA-"
        "Factory's own checkpoint offload to host memory and needs no package."
    ),
    "config.unsloth-cutoff": _warning(
        "LLaMA-Factory pads preference rows to a multiple of 8; unsloth 2026.10.9 cuts the ids back to `cutoff_len` "
        "(models/llama.py) but not the labels, and the run ends: Logits (batchsize x seqlen) and labels must have the "
        "same shape."
    ),
    "config.liger-no-fused-loss": _info(
        "Outside pt and sft LLaMA-Factory turns Liger's fused linear cross-entropy off: RMSNorm, SwiGLU and "
        "RoPE are fused, the logits of dpo are as large as before."
    ),
    "config.liger-twice": _warning(
        "`use_liger_kernel` is transformers' own switch with its own defaults; LLaMA-Factory's is "
        "`enable_liger_kernel`, and both together patch the model twice."
    ),
    "config.allocator-setting": _warning(
        'torch refuses an allocator setting it does not know ("Unrecognized key") when a rank first uses the GPU; '
        "names differ between releases."
    ),
    "config.eval-batch-default": _warning(
        "`per_device_eval_batch_size` defaults to 8, which in dpo is 16 rows of fp32 logits: training fits "
        "and the first evaluation runs out of memory."
    ),
    "config.eval-data-unused": _info(
        "`val_size` and `eval_dataset` only prepare data; without `eval_strategy` or `do_eval` nothing is evaluated."
    ),
    "config.train-batch-default": _warning(
        "`per_device_train_batch_size` defaults to 8, which in dpo is 16 rows at once."
    ),
    "config.no-do-train": _warning(
        "`do_train` defaults to false: LLaMA-Factory loads everything and ends without training."
    ),
    "config.no-precision": _warning(
        "Without `bf16`, `fp16` or `pure_bf16` everything is computed and kept in fp32: twice the activations"
        " and logits."
    ),
    "config.fp16-dpo": _info(
        "fp16 overflows at 65,504 and relies on loss scaling; bf16 has fp32's range at the same size, on "
        "Ampere and newer."
    ),
    "config.bf16-hardware": _warning(
        "Cards before Ampere (V100, T4) have no bf16 units: torch emulates bf16 there, many times slower than fp16, "
        "and its attention keeps all scores, rows x heads x tokens x tokens; the planning commands refuse it."
    ),
    "config.flash-attn-hardware": _error(
        "FlashAttention-2's kernels need Ampere or newer (compute capability 8.0): on V100 and T4 the first forward "
        'stops with "FlashAttention only supports Ampere GPUs or newer".'
    ),
    "config.no-cutoff": _warning(
        "`cutoff_len` defaults to 2,048: longer prompts and answers are cut at the tail, and pairs that "
        "differ only there become identical."
    ),
    "config.packing-dpo": _info("dpo does not pack; `packing: true` only lowers `cutoff_len` by one."),
    "config.pref-ftx": _info("`pref_ftx` adds an sft loss on the chosen answers; 0 is plain dpo."),
    "config.lora-dropout-dpo": _info("dpo turns every dropout of the model off, `lora_dropout` included."),
    "config.lora-keys-full": _info("The key shapes LoRA only and does nothing with this `finetuning_type`."),
    "config.pref-loss-ignored": _warning(
        "LLaMA-Factory 0.9.5 leaves hinge, ipo and kto_pair to trl's `dpo_loss` without naming them "
        "(train/dpo/trainer.py 206), and the pinned trl takes the loss as an argument, sigmoid unless given: each "
        "trains plain DPO."
    ),
    "config.reference-ignored": _warning("orpo and simpo use no reference model; `ref_model` is ignored."),
    "config.pref-keys-stage": _info("The key is read only by preference stages."),
    "config.many-checkpoints": _warning(
        "Without `save_total_limit` every checkpoint stays; under DeepSpeed each full one takes 14 to 16 "
        "bytes a parameter unless `save_only_model` is set."
    ),
    "config.zero3-qlora": _warning(
        "transformers does not shard a quantized model while it loads (modeling_utils.py 1481): every GPU "
        "first holds all of it."
    ),
    "config.output-has-checkpoints": _warning(
        "LLaMA-Factory resumes from the newest checkpoint in `output_dir` without asking, another recipe's included."
    ),
    "config.output-not-empty": _error(
        "LLaMA-Factory stops when `output_dir` already holds a finished model and no checkpoint to resume from."
    ),
    "config.overwrite-output": _warning(
        "`overwrite_output_dir: true` starts over in a folder that holds checkpoints; rotation may then "
        "delete the old ones."
    ),
    "config.cli-json": _warning(
        "Plain llamafactory-cli cannot read a JSON recipe (it passes a path to json.load); dpofit can."
    ),
    "config.cli-spaces": _warning(
        "Plain llamafactory-cli splits its torchrun command at spaces, so a recipe path with spaces fails on "
        "several GPUs."
    ),
    "config.quantization-not-applied": _warning(
        "Only bnb, hqq and eetq quantize on the fly; with any other `quantization_method`, `quantization_bit`"
        " does nothing and the model loads in 16 bits."
    ),
    "config.zero3-gather": _warning(
        "At stage 3 without `stage3_gather_16bit_weights_on_model_save` no loadable weights are saved, only "
        "ZeRO shards."
    ),
    "config.badam-distributed": _warning(
        "On several GPUs BAdam runs only layer-wise under ZeRO-3; anything else is refused."
    ),
    "config.optim-of-block-optimizer": _error(
        "GaLore goes with adamw_torch, the 8-bit AdamWs of bitsandbytes and adafactor, APOLLO with adamw_torch alone; "
        "transformers 5 defaults to adamw_torch_fused, with which the trainer stops at `Unknown optim` "
        "(train/trainer_utils.py)."
    ),
    "config.layerwise-distributed": _warning(
        "Updates layer by layer are refused on several GPUs (hparams/parser.py 387-392): one GPU, or not layer-wise."
    ),
    "config.own-optimizer-deepspeed": _error(
        "DeepSpeed hands an optimizer flat weights of its own: Muon stops at the first step (KeyError: 'use_muon'), "
        "and Adam-mini too (IndexError: too many indices for tensor of dimension 1)."
    ),
    "config.shift-attn": _error(
        "LLaMA-Factory 0.9.5 shifts the attention of Llama models only, and there asks for transformers 4.45 to 4.47 "
        "(model_utils/longlora.py): with the pinned one the run stops while loading. For others it does nothing."
    ),
    "config.offload-param-stage": _warning("`offload_param` works only at stage 3."),
    "config.deepspeed-ignored-key": _warning("DeepSpeed does not know this section and ignores it silently."),
    "config.deepspeed-batch": _info("A fixed `train_batch_size` ties the recipe to one number of GPUs."),
    "config.long-context-stock": _info(
        "Long-context pieces are dpofit's: plain llamafactory-cli knows nothing of them and runs stock, with stock's "
        "memory."
    ),
    "config.deepspeed-location": _info(
        "Where the DeepSpeed file was found; LLaMA-Factory looks in the working directory only."
    ),
    "config.expandable-overwritten": _warning(
        "On several GPUs llamafactory-cli overwrites PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True "
        "unless OPTIM_TORCH=0."
    ),
    "config.secret-in-file": _warning(
        "The file holds a token in plain text; anyone who reads or commits it has the token."
    ),
    "config.files-missing": _warning("A path that must exist when the run starts does not exist on this machine."),
}
