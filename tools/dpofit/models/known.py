"""Finds the shape of a model by the name people write in a recipe, or by a folder or file on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.models.config import SUPPORTED, read_config, shape_from_config
from dpofit.models.shape import ModelShape

# Why a name that is not known is out of scope, where the name itself says so.
_REASONS = (
    (r"-a\d+b\b|moe|mixtral|\d+x\d+b|deepseek-((coder-)?v[23]|r1$|r1-0528$|r1-zero)|llama-4", "a mixture of experts"),
    (r"\bvl\b|-vl-|qvq|vision|omni|audio|pixtral|llava|qwen3\.5", "a vision or audio model"),
    (r"gptq|awq|int[48]\b|[48]-?bits?\b|bnb|gguf|fp8|mlx", "a checkpoint quantised beforehand"),
    (r"gemma-3-(4|12|27)b|medgemma-(4b|27b-it|1\.5)|gemma-3n|gemma-4|glm-?4\.[15]v|glm-ocr",
     "a model that LLaMA-Factory loads whole, with its vision tower and projector"),
    (r"phi-(1|2$|3-small)|gemma|glm|internlm|baichuan|falcon|bloom|\bgpt|granite|olmo|minicpm", "another architecture"),
)  # fmt: skip
# glm-4-9b of 2024: a config.json of model_type chatglm, with code of its own that isn't transformers' glm
_OWN_CODE = re.compile(r"glm-4-9b(-chat)?(-1m)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Row:
    model_id: str
    config: Mapping[str, Any]
    max_positions: int
    source: str

    def shape(self, name: str, note: str = "") -> ModelShape:
        config = {**self.config, "max_position_embeddings": self.max_positions}
        return shape_from_config(config, name=name, source=f"{self.source}{note}", where=self.model_id)


def find_model(reference: str, base: Path | None = None) -> ModelShape:
    """The shape of `reference`: a folder with config.json, such a file, or a known model's name.

    What lies on this machine wins over a name, as in transformers; relative paths are tried in the working
    directory, then in `base` (the recipe's folder). Names need not be exact in case or owner
    (`qwen2.5-72b`, `unsloth/Qwen2.5-7B`), and a path of another machine is taken by its last part; the
    shape's `source` then says so. Never goes to the network. Raises BadInput for anything else, saying
    what is supported and which known names are nearest.
    """
    for path in _local_candidates(reference, base):
        if os.path.isfile(path):  # unlike Path.is_file, false for names no file system takes
            return read_config(path)
        if os.path.isdir(path):
            if not (path / "config.json").is_file():
                raise BadInput(Problem(str(path), None, "has no config.json", "Point at the model's own folder"))
            return read_config(path / "config.json")

    rows = _rows()
    parts = [part for part in re.split(r"[/\\]", reference.strip()) if part]
    exact = rows.get("/".join(parts).lower())
    if exact is not None:
        return exact.shape(exact.model_id)
    if parts and _OWN_CODE.fullmatch(parts[-1]):
        wrong = f"{reference!r} runs code of its own repository (chatglm), which is not modelled"
        right = f"The same weights for transformers' own code: zai-org/{parts[-1]}-hf. Supported: {SUPPORTED}"
        raise BadInput(Problem("model_name_or_path", None, wrong, right))
    row = _by_bare_name().get(_bare(parts[-1])) if parts else None
    if row is not None:
        note = "" if len(parts) == 1 else f"; {reference} taken for {row.model_id} by its name"
        return row.shape(row.model_id, note)
    raise BadInput(_unknown(reference))


def known_models() -> tuple[str, ...]:
    """Every model id known without a config.json, in the data file's order."""
    return tuple(row.model_id for row in _rows().values())


def _local_candidates(reference: str, base: Path | None) -> list[Path]:
    if not reference.strip():
        return []
    path = Path(os.path.expanduser(reference))
    return [path] if path.is_absolute() or base is None else [path, base / path]


@cache
def _rows() -> dict[str, _Row]:
    text = Path(__file__).with_name("known.json").read_text(encoding="utf-8")
    return {
        model_id.lower(): _Row(model_id, entry["config"], positions, entry["source"])
        for entry in json.loads(text)
        for model_id, positions in entry["max_positions"].items()
    }


@cache
def _by_bare_name() -> dict[str, _Row]:
    return {_bare(row.model_id.rpartition("/")[2]): row for row in _rows().values()}


def _bare(name: str) -> str:
    """`Meta-Llama-3-8B`, `Llama-2-7b-hf`, `Qwen-1_8B` → llama-3-8b, llama-2-7b, qwen-1.8b."""
    return name.lower().removeprefix("meta-").removesuffix("-hf").removesuffix("-ms").replace("_", ".")


def _unknown(reference: str) -> Problem:
    import difflib

    names = {_bare(row.model_id.rpartition("/")[2]): row.model_id for row in _rows().values()}
    last = _bare(re.split(r"[/\\]", reference.strip())[-1])
    nearest = [names[match] for match in difflib.get_close_matches(last, names, n=3, cutoff=0.6)]
    reason = next((why for pattern, why in _REASONS if re.search(pattern, last)), None)
    wrong = f"{reference!r} looks like {reason}, which is not modelled" if reason else (
        f"{reference!r} is neither a model known by name nor a folder with config.json on this machine"
    )  # fmt: skip
    known = f"Nearest known names: {', '.join(nearest)}. " if nearest else ""
    return Problem(
        "model_name_or_path",
        None,
        wrong,
        f"{known}Supported: {SUPPORTED}, by name or as a folder with config.json",
    )
