"""Every key LLaMA-Factory's training parser knows, with types, choices and defaults (keys.json, generated).

LLaMA-Factory passes a YAML's values straight into dataclasses (transformers HfArgumentParser.parse_dict): nothing is
converted and nothing is type-checked there, so a wrong type fails late or is silently taken for something else. The
text "false", for one, counts as true.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


def words(text: str) -> frozenset[str]:
    """Names written one after the other."""
    return frozenset(text.split())


# LLaMA-Factory splits these at commas and takes a list as it is (hparams/*_args.py __post_init__ `split_arg`).
COMMA_LISTS = words(
    """
    dataset eval_dataset interleave_probs freeze_trainable_modules freeze_extra_modules lora_target oft_target
    additional_target galore_target apollo_target
    """
)
# Accepted beside what the annotation says: dataset_dir as the content of dataset_info.json (data/parser.py 98),
# resume_from_checkpoint: true (transformers trainer.py: the newest checkpoint).
_ALSO_ACCEPTED = {"dataset_dir": "dict", "resume_from_checkpoint": "bool"}
# Nothing runs, or everything overflows, below one.
_AT_LEAST_ONE = words(
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps cutoff_len lora_rank"
)
_MAY_BE_INFINITE = words("max_grad_norm")
_FEW = 60  # more choices than this (templates) are listed only where none is near
_YAML_NO = {False: "no", True: "yes"}


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One key: `types` are those its annotation allows (bool, int, float, str, list, dict, null)."""

    name: str
    group: str
    types: frozenset[str]
    default: Any
    choices: tuple[str, ...] = ()


@cache
def known_keys() -> dict[str, KnownKey]:
    """All keys by name."""
    return {
        name: KnownKey(name, key["group"], frozenset(key["types"]), key["default"], tuple(key.get("choices", ())))
        for name, key in _data()["keys"].items()
    }


@cache
def pinned_versions() -> dict[str, str]:
    """Package → version that keys.json was generated from."""
    return dict(_data()["packages"])


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True, slots=True)
class DeepSpeedKey:
    """One spelling in a DeepSpeed section: the field it sets, and that field's default."""

    field: str
    default: Any


@cache
def deepspeed_keys(section: str) -> dict[str, DeepSpeedKey]:
    """Spellings of a section (`zero_optimization`, `offload_optimizer`, `offload_param`), from DeepSpeed's models."""
    return {name: DeepSpeedKey(key["field"], key["default"]) for name, key in _data()["deepspeed"][section].items()}


def nearest(name: str, names: list[str] | tuple[str, ...], likeness: float = 0.72) -> str | None:
    """The known name that looks most like this one, if any does (difflib's ratio, 0 to 1)."""
    import difflib  # only when something is wrong

    lowered = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=likeness)
    return lowered[found[0]] if found else None


def wrong_type(key: KnownKey, value: Any) -> tuple[str, str] | None:
    """(what is wrong, what would be right) with a value's type, or None. Numbers written as text are wrong."""
    types = key.types | {_ALSO_ACCEPTED.get(key.name, "")}
    if value is None:
        # A switch left empty counts as off.
        return None if types & {"null", "bool"} else ("is null", f"Give {_wanted(key)}, or remove the key.")
    if isinstance(value, bool):
        if types & {"bool"}:
            return None
        if key.choices and _YAML_NO[value] in key.choices:
            said = _YAML_NO[value]
            return f"YAML reads the bare word {said} as {str(value).lower()}", f'Write "{said}" in quotes.'
        return f"is {str(value).lower()}", f"Give {_wanted(key)}."
    if isinstance(value, int):
        # 0 and 1 in a switch behave as they look.
        ok = types & {"int", "float"} or (value in (0, 1) and "bool" in types)
    elif isinstance(value, float):
        ok = "float" in types
    elif isinstance(value, str):
        if "bool" in types and "str" not in types:
            return _text_for_switch(value)
        ok = "str" in types
    elif isinstance(value, list):
        ok = "list" in types or key.name in COMMA_LISTS
    else:
        ok = isinstance(value, dict) and "dict" in types
    return None if ok else (f"is {_shown(value)}", f"Give {_wanted(key)}.")


def wrong_choice(key: KnownKey, value: Any) -> tuple[str, str] | None:
    """(what is wrong, what would be right) when a value is not among a key's choices, or None."""
    if not key.choices or value is None or not isinstance(value, str) or value in key.choices:
        return None
    close = nearest(value, key.choices, likeness=0.6)
    if close and len(key.choices) > _FEW:
        return f"is {value!r}", f"Did you mean {close}?"
    meant = f"Did you mean {close}? " if close else ""
    return f"is {value!r}", f"{meant}Choose one of {', '.join(key.choices)}."


_LARGEST_FLOAT = sys.float_info.max


def out_of_range(key: KnownKey, value: Any) -> tuple[str, str] | None:
    """(what is wrong, what would be right) with a number no run can use, or None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    infinite = abs(value) > _LARGEST_FLOAT  # math.isinf refuses integers no float holds
    if value != value or (infinite and key.name not in _MAY_BE_INFINITE):
        return f"is {value}", "Give a finite number."
    if key.name in _AT_LEAST_ONE and value < 1:
        return f"is {value}", "Give 1 or more."
    return None


def _text_for_switch(value: str) -> tuple[str, str] | None:
    """Any non-empty text switches a switch on, "false" included (nothing is converted)."""
    if value.lower() in ("true", "1", "yes", "y", "on"):
        return None
    return (
        f"is the text {value!r}, which LLaMA-Factory takes for {'true' if value else 'false'}",
        "Write true or false without quotes.",
    )


def _wanted(key: KnownKey) -> str:
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "dict": "a mapping"}
    if key.choices:
        return f"one of {', '.join(key.choices)}"
    wanted = [names[kind] for kind in ("bool", "int", "float", "str", "dict") if kind in key.types]
    if "list" in key.types or key.name in COMMA_LISTS:
        wanted.append("a list")
    return " or ".join(wanted)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f"the text {value!r}" if isinstance(value, str) else repr(value)
