"""Reads the public cases and turns each one's `job` into the Job that dpofit would plan for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from dpofit.hardware.cluster import Cluster
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.job import PINNED, Job, Lengths
from dpofit.models.config import shape_from_config
from dpofit.models.known import find_model
from dpofit.models.shape import ModelShape
from dpofit.recipe.load import load_recipe
from dpofit.recipe.recipe import Recipe
from dpofit.units import GIB

CASES = Path(__file__).with_name("cases")
Half = Literal["calibration", "scoring"]
# What a case's job needs to be a LLaMA-Factory YAML, and does not change memory.
_REST = {"do_train": True, "dataset": "identity", "template": "default", "output_dir": "saves/case"}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, and the shorter batches the run had beside it (none, where a benchmark has one length), in each order they
    may have come in."""

    job: Job
    mixes: tuple[tuple[Lengths, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement. `kind`: allocated, reserved (torch's maxima), nvml, or longest (tokens of the longest row that
    ran). `until`: the last phase before the measurement ended. `job` None: `excluded` says why."""

    name: str
    group: str
    source: str
    kind: str
    value: int  # bytes; tokens for longest
    known_code: bool  # the operators that ran are those modelled
    job: Mapping[str, Any] | None
    excluded: str
    until: str | None

    @property
    def half(self) -> Half:
        """Calibration when the first byte of SHA-256 of the name is even, else scoring."""
        return "calibration" if sha256(self.name.encode()).digest()[0] % 2 == 0 else "scoring"


@dataclass(frozen=True, slots=True)
class Verdicted:
    """One run known to have fitted or to have run out of memory on `side` (gpu, host)."""

    name: str
    happened: Literal["oom", "fits"]
    side: Literal["gpu", "host"]
    source: str
    facts: str
    assumed: str
    job: Mapping[str, Any] | None
    undecidable: str
    out_of_scope: str


def measured_cases() -> list[Measured]:
    """Every row of cases/measured.json."""
    return [
        Measured(
            row["id"], row["group"], row["source"], row["measured"]["kind"],
            row["measured"].get("bytes", row["measured"].get("tokens_per_gpu")), row["known_code"], row.get("job"),
            row.get("out_of_scope") or row.get("undecidable") or "", row.get("job", {}).get("until"),
        )
        for row in _read("measured.json")
    ]  # fmt: skip


def verdict_cases() -> list[Verdicted]:
    """Every row of cases/verdicts.json."""
    return [
        Verdicted(
            row["id"], row["happened"], row["side"], row["source"], row["facts"], row.get("assumed", ""),
            row.get("job"), row.get("undecidable", ""), row.get("out_of_scope", ""),
        )
        for row in _read("verdicts.json")
    ]  # fmt: skip


def _read(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((CASES / name).read_text(encoding="utf-8"))["cases"]
    return cases


def planned(spec: Mapping[str, Any]) -> PlannedJob:
    """The job of a case, through the recipe loader that users have. Raises BadInput for what dpofit refuses."""
    model = _model(spec)
    recipe = replace(_recipe(spec), expandable_segments=spec.get("expandable_segments"))
    stage = spec["recipe"]["stage"]
    host = spec.get("host_ram_gib")
    cluster = Cluster(
        find_gpu(spec["gpu"]), spec["nodes"], spec["gpus_per_node"], None if host is None else int(host * GIB)
    )
    lengths = _lengths(spec["tokens"], stage, spec["padding"])
    mix = [_lengths(tokens, stage, spec["padding"]) for tokens in spec.get("mix_tokens", ())]
    return PlannedJob(Job(recipe, model, cluster, lengths, replace(PINNED, **spec["stack"])), _orders(mix))


def _orders(mix: Sequence[Lengths]) -> tuple[tuple[Lengths, ...], ...]:
    """Of a mix no order is known, and which rows come early decides how much is reserved: every other stands first."""
    return tuple((*mix[start:], *mix[:start]) for start in range(0, len(mix) or 1, 2))


def _lengths(tokens: int, stage: str, padded: bool) -> Lengths:
    """A row of `tokens`, an eighth of them the answer; only the sum matters to the GPU."""
    response = tokens // 8
    return Lengths(tokens - response, response, response, padded)


def _model(spec: Mapping[str, Any]) -> ModelShape:
    name = spec["recipe"]["model_name_or_path"]
    config = spec.get("model_config")
    return shape_from_config(config, name=name, source="the case", where=name) if config else find_model(name)


def _recipe(spec: Mapping[str, Any]) -> Recipe:
    settings = {**_REST, "cutoff_len": spec["tokens"], **spec["recipe"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return load_recipe(str(path), environment={}).recipe
