"""The long-context pieces of a run: which are on, by precedence, and what a recipe must be for them to work.

A piece changes how training computes, never what it computes (docs/long-context.md). LLaMA-Factory's YAML has no key
for it, so the pieces come from dpofit's own sources: `--long-context`, DPOFIT_LONG_CONTEXT, dpofit.yaml, the card.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dpofit.errors import BadInput
from dpofit.recipe.catalogue import card_pieces
from dpofit.recipe.issue import Issue
from dpofit.recipe.keys import nearest
from dpofit.recipe.run import Run
from dpofit.recipe.yaml_file import read_document

PIECES = ("answer_logps", "shared_prompt", "cached_reference", "tiled_mlp", "offload_checkpoints")
VARIABLE = "DPOFIT_LONG_CONTEXT"
OPTION = "--long-context"
RUN_FILE, RUN_KEY = "dpofit.yaml", "long_context"


def parse_pieces(text: str, where: str, key: str) -> frozenset[str]:
    """`all`, `off`, or names with commas between them. BadInput names every one that is no piece."""
    words = [word for word in (part.strip() for part in text.split(",")) if word]
    if words in (["all"], ["off"]):
        return frozenset(PIECES if words == ["all"] else ())
    unknown = [word for word in words if word not in PIECES]
    if unknown or not words:
        raise BadInput([_unknown(word, where, key).problem() for word in unknown or [text]])
    return frozenset(words)


def written(pieces: Iterable[str]) -> str:
    """What `--long-context` and DPOFIT_LONG_CONTEXT take for these pieces: names in their own order, or `off`."""
    chosen = frozenset(pieces)
    return ",".join(piece for piece in PIECES if piece in chosen) or "off"


def with_option(process: Mapping[str, str], option: str | None) -> Mapping[str, str]:
    """The process environment, `--long-context` over its DPOFIT_LONG_CONTEXT. BadInput for an unknown piece."""
    if option is None:
        return process
    return {**process, VARIABLE: written(parse_pieces(option, "command line", OPTION))}


def long_context_pieces(recipe: Path, process: Mapping[str, str]) -> tuple[frozenset[str], list[Issue]]:
    """The pieces that are on for a run of this recipe file, and what is wrong where they are named."""
    if text := process.get(VARIABLE):
        try:
            return parse_pieces(text, "environment", VARIABLE), []
        except BadInput as bad:
            return frozenset(), [
                Issue("config.long-context-piece", "environment", VARIABLE, problem.wrong, problem.right)
                for problem in bad.problems
            ]
    switches, issues = _run_file_switches(recipe.with_name(RUN_FILE))
    on = {**dict.fromkeys(card_pieces(recipe), True), **switches}
    return frozenset(piece for piece, wanted in on.items() if wanted), issues


def long_context_issues(run: Run) -> Iterator[Issue]:
    """Why a piece that is on can't work in this run, as far as the recipe alone tells (the model: memory/scope.py)."""
    s, on = run.settings, run.long_context
    if on and s.on("use_unsloth"):
        right = "Turn one off; unsloth replaces the model's code."
        yield _cannot(run, "use_unsloth", f"is on with {written(on)}", right)
    if "answer_logps" in on:
        yield from _answer_logps(run)
    if "shared_prompt" in on:
        yield from _shared_prompt(run)
    if "cached_reference" in on and not (run.stage == "kto" or run.uses_reference):  # kto has one whatever the loss
        loss = f" with pref_loss {s['pref_loss']}" if run.stage == "dpo" else ""
        wrong = f"is {run.stage}{loss}, which has no reference for cached_reference"
        yield _cannot(run, "stage", wrong, "Turn the piece off.")
    if "offload_checkpoints" in on:
        if s.on("use_unsloth_gc"):
            yield _cannot(run, "use_unsloth_gc", "is on beside offload_checkpoints, which replaces it", "Keep one.")
        if s.on("disable_gradient_checkpointing"):
            wrong = "leaves offload_checkpoints nothing to move"
            yield _cannot(run, "disable_gradient_checkpointing", wrong, "Remove it, or turn the piece off.")
        if not s.on("use_reentrant_gc"):
            wrong = "is off; offload_checkpoints is exact for reentrant checkpointing only"
            yield _cannot(run, "use_reentrant_gc", wrong, "Remove it, or turn the piece off.")
    if "cached_reference" in on and s.on("streaming"):
        wrong = "is on; cached_reference must see the whole data set before training"
        yield _cannot(run, "streaming", wrong, "Remove it, or turn the piece off.")
    if "tiled_mlp" in on and s.number("lora_dropout") > 0 and run.stage not in ("dpo", "kto"):  # those turn it off
        wrong = f"is {s['lora_dropout']}; tiled_mlp can't repeat a dropout in backward"
        yield _cannot(run, "lora_dropout", wrong, "Set it to 0, or turn the piece off.")


# What else of SFT reads the logits that answer_logps does not make (llamafactory 0.9.5 train/sft/trainer.py 96-115).
_READS_LOGITS = (
    "use_dft_loss", "use_eaft_loss", "use_asft_loss", "label_smoothing_factor", "compute_accuracy",
    "predict_with_generate",
)  # fmt: skip


def _answer_logps(run: Run) -> Iterator[Issue]:
    s = run.settings
    if run.stage not in ("dpo", "kto", "sft"):
        yield _cannot(run, "stage", f"is {run.stage}; answer_logps is for dpo, kto and sft", "Turn the piece off.")
    for key in _READS_LOGITS if run.stage == "sft" else ():
        if s.on(key):
            yield _cannot(run, key, "is on; it reads the logits that answer_logps does not make", "Turn one off.")
    if run.method == "lora" and "lm_head" in s.names("lora_target"):
        right = "Train the head by additional_target: lm_head, or turn the piece off."
        yield _cannot(run, "lora_target", "names lm_head; answer_logps needs a plain head", right)


def _shared_prompt(run: Run) -> Iterator[Issue]:
    s = run.settings
    if run.stage != "dpo":
        yield _cannot(run, "stage", f"is {run.stage}; shared_prompt needs pairs (dpo)", "Turn the piece off.")
        return
    batches = ["per_device_train_batch_size", *(["per_device_eval_batch_size"] if run.do_eval else [])]
    for key in batches:
        if s[key] != 1:
            yield _cannot(run, key, f"is {s[key]}; shared_prompt takes one pair at a time", "Set it to 1.")
    for key in ("packing", "neat_packing"):
        if s.on(key):
            yield _cannot(run, key, "is on; shared_prompt lays out rows itself", "Remove it.")
    if s["flash_attn"] == "disabled":
        wrong = "is disabled (eager attention); shared_prompt splits attention in two calls of sdpa or flash-attention"
        yield _cannot(run, "flash_attn", wrong, "Set it to auto, sdpa or fa2.")
    if s["flash_attn"] == "fa3":
        yield _cannot(run, "flash_attn", "is fa3; shared_prompt knows sdpa and fa2", "Set it to auto, sdpa or fa2.")
    if s["rope_scaling"] == "dynamic":
        wrong = "is dynamic; shared_prompt needs positions whose frequencies do not depend on a batch's length"
        yield _cannot(run, "rope_scaling", wrong, "Set it to linear, llama3 or yarn.")
    if s.on("shift_attn"):
        yield _cannot(run, "shift_attn", "is on; shared_prompt needs whole attention", "Remove it.")


def _cannot(run: Run, key: str, wrong: str, right: str) -> Issue:
    return run.settings.issue("config.long-context", key, wrong, right)


def _unknown(name: str, where: str, key: str) -> Issue:
    close = nearest(name, list(PIECES))
    meant = f"Did you mean {close}? " if close else ""
    return Issue(
        "config.long-context-piece", where, key, f"{name!r} is no piece", f"{meant}There are: {', '.join(PIECES)}."
    )


def _run_file_switches(path: Path) -> tuple[dict[str, bool], list[Issue]]:
    """`long_context:` of a run folder's dpofit.yaml: piece → on."""
    if not os.path.isfile(path):
        return {}, []
    document = read_document(path)
    asked = document.values.get(RUN_KEY)
    where = document.where(RUN_KEY)
    if asked is None:
        return {}, []
    if not isinstance(asked, dict):
        right = "Write PIECE: true or false lines under it."
        return {}, [Issue("config.long-context-piece", where, RUN_KEY, "is not a mapping", right)]
    issues = [_unknown(str(name), where, RUN_KEY) for name in asked if name not in PIECES]
    issues += [
        Issue("config.long-context-piece", where, f"{RUN_KEY}.{name}", "is not true or false", "Write true or false.")
        for name, value in asked.items()
        if name in PIECES and not isinstance(value, bool)
    ]
    return ({} if issues else {str(name): bool(value) for name, value in asked.items()}), issues
