"""Writes tools/dpofit/recipe/keys.json: every key LLaMA-Factory's training parser knows, from the pinned packages.

Run inside the training stack:
    python scripts/export_keys.py            write the file
    python scripts/export_keys.py --check    exit 1 when the file differs from what the installed packages say
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import types
import typing
from pathlib import Path
from typing import Any

from generated import parser, write_or_check

KEYS_FILE = Path(__file__).resolve().parents[1] / "tools" / "dpofit" / "recipe" / "keys.json"
PACKAGES = ("llamafactory", "transformers", "deepspeed")
# Values the parser turns into one of these enums later (transformers 5.5.4 training_args.py 1483-1488) although the
# field is annotated as plain text.
ENUM_KEYS = {
    "eval_strategy": "IntervalStrategy",
    "logging_strategy": "IntervalStrategy",
    "save_strategy": "SaveStrategy",
    "hub_strategy": "HubStrategy",
    "lr_scheduler_type": "SchedulerType",
    "optim": "OptimizerNames",
}
TYPE_NAMES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", Path: "str"}


def main() -> int:
    """Writes or checks the file; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    return write_or_check({KEYS_FILE: render()}, check)


def render() -> str:
    """The file's text, one key a line so that a version change reads well in a diff."""
    from llamafactory.data.template import TEMPLATES
    from llamafactory.hparams.parser import _TRAIN_ARGS

    keys: dict[str, dict[str, Any]] = {}
    for group in _TRAIN_ARGS:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.init and field.name not in keys:  # the first group to name a key wins, as in parse_dict
                keys[field.name] = describe(field, hints[field.name], group.__name__)
    keys["template"]["choices"] = sorted(TEMPLATES)  # data/template.py 638: any other name raises, after loading
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(keys[name])}" for name in sorted(keys))
    sections = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in deepspeed_sections().items()
    )
    return f'{{"packages": {json.dumps(versions)},\n "keys": {{\n{rows}\n}},\n "deepspeed": {{\n{sections}\n}}}}\n'


def deepspeed_sections() -> dict[str, dict[str, dict[str, Any]]]:
    """Section → every spelling DeepSpeed accepts → the field it sets and that field's default."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for section, model in models.items():
        spellings: dict[str, dict[str, Any]] = {}
        for name, field in model.model_fields.items():
            default = None if field.default_factory is not None else _plain(field.default)
            described = {
                "field": name,
                "default": default if isinstance(default, (bool, float, str)) or default is None else int(default),
            }
            for spelling in {name, field.alias or name}:
                spellings[spelling] = described
        sections[section] = dict(sorted(spellings.items()))
    return sections


def describe(field: dataclasses.Field[Any], hint: Any, group: str) -> dict[str, Any]:
    """One key: the dataclass it belongs to, the types its annotation allows, choices, default."""
    kinds: set[str] = set()
    choices: list[str] = []
    for part in _parts(hint):
        if typing.get_origin(part) is typing.Literal:
            choices += typing.get_args(part)
            kinds.add("str")
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            choices += [member.value for member in part]
            kinds.add("str")
        elif part is type(None):
            kinds.add("null")
        else:
            origin = typing.get_origin(part) or part
            kinds.add(TYPE_NAMES.get(origin, "dict"))  # GenerationConfig, AcceleratorConfig: written as a mapping
    if field.name in ENUM_KEYS:
        import transformers.trainer_utils
        import transformers.training_args

        name = ENUM_KEYS[field.name]
        owner = getattr(transformers.trainer_utils, name, None) or getattr(transformers.training_args, name)
        choices = [member.value for member in owner]
        kinds = {"str"}
    described: dict[str, Any] = {"group": group, "types": sorted(kinds), "default": _plain(_default(field))}
    choices = choices or list(field.metadata.get("choices", ()))
    if choices:
        described["choices"] = choices
    return described


def _parts(hint: Any) -> list[Any]:
    """The members of a union, itself otherwise."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(hint) for inner in _parts(part)]
    return [hint]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


if __name__ == "__main__":
    raise SystemExit(main())
