"""The variables a launch sets, each with the reason for it; what the user has set already wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dpofit.recipe.environment import ALLOCATOR_VARIABLES, launcher_sets_allocator
from dpofit.recipe.long_context import VARIABLE, long_context_pieces, written
from dpofit.recipe.recipe import Recipe

CACHE = Path.home() / ".cache" / "dpofit"  # what takes minutes to make again, and nothing else
_SECRET = re.compile(r"token|key|secret|password", re.I)


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable that dpofit sets for the job."""

    name: str
    value: str
    why: str


def launch_variables(
    recipe: Recipe, process: Mapping[str, str], processes: int, cores: int, torchrun: bool = True
) -> tuple[Variable, ...]:
    """What to set on top of `process` for this recipe; `processes` and `cores` are this node's.

    A name the user has exported is left alone, except that one allocator name is copied to the other.
    """
    reasons = _card_reasons(recipe.source)
    variables = [
        Variable(name, value, reasons.get(name, "from dpofit.yaml beside the recipe"))
        for name, value in recipe.environment.items()
        if process.get(name) != value
    ]
    known = {**process, **{variable.name: variable.value for variable in variables}}
    if launcher_sets_allocator(known):
        said = next((known[name] for name in ALLOCATOR_VARIABLES if known.get(name)), None)
        for name in ALLOCATOR_VARIABLES:
            if name not in known:
                why = (
                    "growing segments can be reused by batches of any length; torch releases read one name or the other"
                )
                variables.append(Variable(name, said or "expandable_segments:True", why))
        if "TORCH_NCCL_AVOID_RECORD_STREAMS" not in known:
            why = "collectives give their buffers back at once (LLaMA-Factory's own launcher sets it too)"
            variables.append(Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", why))
    if pieces := _long_context(recipe, process):
        variables.append(pieces)
    if "OMP_NUM_THREADS" not in known and torchrun:
        offloads = recipe.zero is not None and recipe.zero.offload_optimizer != "none"
        if offloads:
            threads = max(1, cores // processes)
            why = f"the optimizer runs on the CPU: {cores} cores / {processes} ranks; torchrun would set 1"
            variables.append(Variable("OMP_NUM_THREADS", str(threads), why))
    return tuple(variables)


def _long_context(recipe: Recipe, process: Mapping[str, str]) -> Variable | None:
    """The pieces as the ranks shall see them; None when they would find the same without being told."""
    asked, found = recipe.long_context, long_context_pieces(recipe.source, process)[0]
    if not asked and not found:
        return None
    return Variable(VARIABLE, written(asked), "long-context pieces of this run (docs/long-context.md)")


def cpu_variables(processes: int, cores: int) -> tuple[Variable, ...]:
    """For ranks on the CPU: gloo, DeepSpeed's CPU accelerator, compiled operators kept apart by version."""
    operators = CACHE / f"torch-{_version('torch')}-deepspeed-{_version('deepspeed')}"
    return (
        Variable("DPOFIT_CPU", "1", "ranks on the CPU"),
        Variable("DS_ACCELERATOR", "cpu", "ranks on the CPU"),
        Variable("CUDA_VISIBLE_DEVICES", "", "ranks on the CPU"),
        Variable("OMP_NUM_THREADS", str(max(1, cores // processes)), f"{cores} cores / {processes} ranks"),
        # torch keys its cache of compiled operators by name only.
        Variable("TORCH_EXTENSIONS_DIR", str(operators), "compiled DeepSpeed operators, apart from other versions'"),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def masked(name: str, value: str) -> str:
    """The value as it may be shown: names that look like secrets are hidden."""
    return "********" if _SECRET.search(name) else value


def catalogue_source(recipe: Path) -> Path:
    """The catalogue recipe that a run folder's recipe was copied from (its dpofit.yaml says so), else the recipe."""
    from dpofit.recipe.catalogue import find_recipe, read_yaml

    run_file = recipe.with_name("dpofit.yaml")
    if not run_file.is_file():
        return recipe
    document = read_yaml(run_file)
    name = document.get("recipe") if isinstance(document, dict) else None
    return (find_recipe(str(name)) if name else None) or recipe


def _card_reasons(recipe: Path) -> dict[str, str]:
    from dpofit.recipe.cards import card_of, environment_of, read_presets

    card = card_of(catalogue_source(recipe))
    if card is None:
        return {}
    return {name: variable.why for name, variable in environment_of(card, read_presets()).items()}
