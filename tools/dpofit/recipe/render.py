"""Renders recipe files: card, preset and defaults in; a fully expanded, commented LLaMA-Factory YAML out."""

from __future__ import annotations

import json

from dpofit.errors import BadInput, Problem
from dpofit.recipe.cards import FamilyCard, Presets, RecipeCard, Value, environment_of, pieces_of
from dpofit.recipe.long_context import written

_COMMENT_COLUMN = 42


def recipe_settings(family: FamilyCard, name: str, presets: Presets) -> dict[str, Value]:
    """Every key of a recipe: defaults, then the preset's knobs, the family, the card.

    BadInput when two knobs of a preset set the same key, or a card sets one that follows from the others.
    """
    card = family.recipes[name]
    settings = dict(presets.defaults)
    set_by: dict[str, str] = {}
    problems = []
    for knob_name, knob in presets.knobs_of(card.preset).items():
        for key, value in knob.settings.items():
            if key in set_by:
                wrong = f"set by both {set_by[key]} and {knob_name}"
                problems.append(Problem(f"preset {card.preset}", key, wrong, "Keep one of the two knobs"))
            set_by[key] = knob_name
            settings[key] = value
    derived: dict[str, Value] = {
        "cutoff_len": card.prompt_tokens + card.response_tokens,
        "output_dir": f"saves/{family.family}/{name}.v{card.version}",
    }
    for key in derived.keys() & {**family.settings, **card.settings}.keys():
        problems.append(Problem(f"card of {name}", key, "follows from the rest of the card", "Remove it"))
    if problems:
        raise BadInput(problems)
    return {**settings, **family.settings, **card.settings, **derived}


def render(family: FamilyCard, name: str, presets: Presets) -> str:
    """The recipe file's text. BadInput when a key has no place in the layout."""
    card = family.recipes[name]
    settings = recipe_settings(family, name, presets)
    sums = {
        "cutoff_len": cutoff_sum(card),
        "gradient_accumulation_steps": batch_sum(card, settings),
    }
    homeless = settings.keys() - {key for section in presets.layout.values() for key in section}
    if homeless:
        raise BadInput([Problem("presets.yaml", key, "has no place in layout", "Add it") for key in sorted(homeless)])
    lines = _header(family, name, presets)
    for section, keys in presets.layout.items():
        lines += ["", f"### {section}"]
        lines += [_line(key, settings[key], sums.get(key, keys[key])) for key in keys if key in settings]
    return "\n".join(lines) + "\n"


def cutoff_sum(card: RecipeCard) -> str:
    """The sum behind `cutoff_len`, as its comment shows it."""
    total = card.prompt_tokens + card.response_tokens
    parts = f"prompt {card.prompt_tokens:,} + answer {card.response_tokens:,}"
    return f"{parts} = {total:,} tokens; higher uses more memory"


def batch_sum(card: RecipeCard, settings: dict[str, Value]) -> str:
    """The sum behind the global batch, as the comment of `gradient_accumulation_steps` shows it."""
    micro_batch = int(settings["per_device_train_batch_size"])
    accumulation = int(settings["gradient_accumulation_steps"])
    world_size = card.hardware.world_size
    return (
        f"{micro_batch} a GPU x {accumulation} x {world_size} GPUs"
        f" = {micro_batch * accumulation * world_size} pairs an update; no effect on memory"
    )


def _header(family: FamilyCard, name: str, presets: Presets) -> list[str]:
    card = family.recipes[name]
    hardware = card.hardware
    nodes = f" on each of {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    variables = environment_of(card, presets)
    pieces = pieces_of(card, presets)
    stock = (
        [
            f"# Long-context pieces: {written(pieces).replace(',', ', ')} (docs/long-context.md).",
            "# `dpofit launch` switches them on; llamafactory-cli knows nothing of them, runs stock, and will not fit.",
        ]
        if pieces
        else []
    )
    return [
        f"# {family.family}/{name}.v{card.version}",
        f"# {card.title or presets.presets[card.preset].title}",
        f"# Written for {hardware} of RAM a node. Set model, dataset and output paths to yours.",
        *stock,
        f"# Run `dpofit copy {family.family}/{name} DIR` and what it prints;",
        f"# or `llamafactory-cli train` on this file{nodes}, from the folder that holds deepspeed/, with",
        *(f"#   {variable}={setting.value}" for variable, setting in variables.items()),
        "# Rendered from card.yaml and ../presets.yaml; a released version never changes.",
    ]


def _line(key: str, value: Value, comment: str) -> str:
    text = f"{key}: {_scalar(value)}"
    return f"{text:<{_COMMENT_COLUMN}}  # {comment}" if comment else text


def _scalar(value: Value) -> str:
    """A scalar that YAML 1.1 (PyYAML) and LLaMA-Factory's OmegaConf read alike: floats always carry a dot."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if isinstance(value, str):
        return value
    return json.dumps(value)
