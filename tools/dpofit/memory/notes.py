"""Remarks on a prediction: what was not checked, what binds by chance, which popular switch does nothing here."""

from __future__ import annotations

from dpofit.memory.badam import layer_in_turn
from dpofit.memory.job import Job
from dpofit.memory.predict import EXPANDABLE_MIX, SEGMENTS_MIX, Prediction
from dpofit.recipe.long_context import written
from dpofit.recipe.notes import Note
from dpofit.units import format_gib


def calibration_note(job: Job) -> Note | None:
    """What a calibrated cluster's own run changes of this job's prediction."""
    own = job.cluster.calibration
    if own is None:
        return None
    ranks = f"{own.world_size} rank{'s' * (own.world_size > 1)}"
    return Note("calibrated", f"By {own.run} ({ranks}): {own.says(job.world_size)}.")


def prediction_notes(prediction: Prediction, mix_given: bool) -> list[Note]:
    """Ids are stable."""
    job, gpu, host = prediction.job, prediction.gpu, prediction.host
    recipe = job.recipe
    notes: list[Note] = []

    def note(identifier: str, text: str) -> None:
        notes.append(Note(identifier, text))

    if calibrated := calibration_note(job):
        notes.append(calibrated)
    if prediction.host_verdict is None:
        note(
            "host-not-checked", f"Host RAM is not known: {format_gib(host.peak_bytes)} a node are needed (--host-ram)."
        )
    if not mix_given:
        *most, last = [f"{share:.0%}" for share in (EXPANDABLE_MIX if gpu.expandable else SEGMENTS_MIX)]
        shares = f"{', '.join(most)} and {last}"
        note("mix-assumed", f"Other batches assumed at {shares} of the longest row (--lengths FILE gives real ones).")
    if recipe.low_rank is not None and not recipe.low_rank.random:
        note("svd-workspace", "The singular vectors are counted; what cuSOLVER needs to find them is not known.")
    turn = layer_in_turn(recipe.badam)
    if turn is not None:
        only = recipe.badam is not None and recipe.badam.switch_mode == "fixed"
        text = f"layer {turn} alone is trained" if only else f"layer {turn}'s turn is shown, which needs most"
        text = f"BAdam: {text}: backward passes all layers above it."
        if recipe.gradient_checkpointing:
            text += " LLaMA-Factory checkpoints only the layer in training."
        note("badam-turn", text)
    if gpu.reserved.out_of_memory and prediction.gpu_verdict != "oom":
        note("fragmentation", "Replayed over mixed lengths the allocator runs out: fragmentation decides.")
    elif gpu.reserved.retries_per_step:
        text = f"The allocator empties its cache {gpu.reserved.retries_per_step:.1f} times a step to go on: slow. "
        text += "What it then holds, the peak, is less than it would take, the interval's upper end."
        note("allocator-retries", text)
    if not gpu.expandable:
        note("expandable-off", "expandable_segments is off: segments of shorter batches stay and fragment memory.")
    if host.high_bytes > host.peak_bytes and recipe.saves and not job.adapters and job.zero_stage == 3:
        text = (
            "DeepSpeed's native save can keep the last 16-bit model alive beside the new one; the high figure has both."
        )
        note("save-leak", text)
    if recipe.long_context:
        text = f"{written(recipe.long_context)}: on when `dpofit launch` runs it; else it is stock."
        note("long-context-launch", text)
    if job.on("cached_reference"):
        text = "The reference's log-probs are computed before step 1 and kept in output_dir: 20 bytes a row of data."
        note("reference-cached", text)
    if recipe.use_unsloth:
        text = "unsloth's layers as they run uncompiled, attention by torch; checkpoints stay on the GPU all the same."
        note("unsloth-on-the-gpu", text)
    if recipe.use_unsloth_gc and recipe.gradient_checkpointing:
        text = (
            f"unsloth gc takes checkpoints off the GPU into pinned host blocks, rounded to powers of two and never "
            f"returned: {format_gib(host.pinned_bytes)} a node pinned in all."
        )
        note("unsloth-gc-pins-host", text)
    if recipe.zero is not None and recipe.zero.offload_optimizer == "cpu":
        note("offload-not-activations", "Offload moves states, not activations or logits.")
    if "paged" in recipe.optim:
        note(
            "paged-optimizer", "Paged optimizer states live in managed memory; counted on the host, where they can go."
        )
    if recipe.saves and not recipe.save_total_limit:
        note("disk-grows", "No save_total_limit: every checkpoint stays; the total counts one.")
    if recipe.gradient_accumulation > 1 and job.zero_stage >= 2:
        note("accumulation-free", "Gradient accumulation changes no memory peak under ZeRO-2 and 3.")
    if job.windowed and job.attention == "efficient":
        text = f"Layers that attend in a window of {job.model.sliding_window:,} tokens have a mask, padding or not."
        note("sliding-window", text)
    if recipe.liger and not job.liger:
        note(
            "liger-no-kernels",
            f"enable_liger_kernel changes nothing: Liger patches no class of a {job.model.model_type}.",
        )
    if job.flash_attn != recipe.flash_attn:
        text = f"flash_attn: auto is eager attention for {job.model.name} unless flash-attn is installed: then set fa2."
        note("eager-attention", text)
    return notes
