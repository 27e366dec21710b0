"""A smoke run: the user's recipe on this machine with a tiny model, saved, resumed, checked; nothing else touched."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.launch.build_lock import operator_cache, remove_left_locks
from dpofit.launch.death import Outcome
from dpofit.launch.environment import CACHE, Variable, cpu_variables, launch_variables
from dpofit.launch.machine import missing_stack, torch_folder
from dpofit.launch.network import free_port
from dpofit.launch.plan import Plan, single_command, torchrun_command
from dpofit.launch.run import run_plan
from dpofit.launch.smoke_model import tiny_config
from dpofit.launch.smoke_plan import SAVE_STEPS, SmokePlan, smoke_plan
from dpofit.launch.topology import Topology
from dpofit.recipe.load import ReadRecipe
from dpofit.recipe.long_context import VARIABLE, written
from dpofit.recipe.recipe import Recipe
from dpofit.train.guard.check import check_checkpoint

ASSETS = Path(__file__).parent / "smoke_assets"
# CPU Adam after a resume (train/smoke.py): 16 of 111,104 bf16 weights rounded the other way; a lost moment moves most.
MAX_ROUNDED = 1e-3
LOSS_TOLERANCE = 2e-3  # the loss is logged with four digits, and computed from bf16 logits


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the run. `ok` None: could not be asked here, `seen` says why."""

    name: str
    ok: bool | None
    expected: str
    seen: str


@dataclass(frozen=True, slots=True)
class SmokeReport:
    """What ran, what was replaced, and what was seen."""

    plan: SmokePlan
    ranks: int
    gpus: int
    seconds: float
    checks: tuple[Check, ...]
    outcome: Outcome
    log: Path | None  # kept when something went wrong

    @property
    def ok(self) -> bool:
        return self.outcome.ok and all(check.ok is not False for check in self.checks)


def smoke(
    read: ReadRecipe, gpus: int, ranks: int, keep: Path | None = None, tell: Callable[[str], None] = lambda text: None
) -> SmokeReport:
    """Run it: train 3 steps with a save after the 2nd, then resume from there in new processes.

    `keep` names a folder to leave everything in; else it lies in a temporary folder that is removed, except for the
    log of a run that failed. BadInput for what can't be run here.
    """
    assert read.recipe is not None
    began = time.monotonic()
    if missing := missing_stack(read.deepspeed is not None):
        raise BadInput(missing)
    _refuse_unbuildable(read.recipe, torch_folder())
    deepspeed = dict(read.deepspeed.config) if read.deepspeed is not None else None
    with _folder(keep) as folder:
        bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
        plan = smoke_plan(read.recipe, deepspeed, folder, gpus, bitsandbytes)
        _write_assets(folder, plan, tiny_config(read.recipe.model, read.recipe.source.parent))
        variables = _variables(read, gpus, ranks, folder)
        log = folder / "log"
        if not gpus:  # our own cache of operators: an earlier smoke run may have been killed while it built one
            remove_left_locks(operator_cache({v.name: v.value for v in variables}))

        def run(name: str, overrides: Sequence[str]) -> Outcome:
            tell(f"{name}: {ranks} rank{'s' if ranks > 1 else ''} on {'GPU' if gpus else 'CPU'}")
            document = {"run": name, "head_scale": plan.head_scale}
            (folder / "smoke.json").write_text(json.dumps(document))
            return run_plan(_job(folder, variables, ranks, deepspeed is not None, overrides, name), log)

        outcome = run("train", ())
        checks = _train_checks(folder, plan)
        if outcome.ok and plan.no_resume is None:
            checkpoint = folder / "output" / f"checkpoint-{SAVE_STEPS}"
            resumed = folder / "resumed"
            outcome = run("resume", (f"resume_from_checkpoint={checkpoint}", f"output_dir={resumed}"))
            checks += _resume_checks(folder, gpus)
        elif plan.no_resume is not None:
            checks.append(Check("resume", None, "bit for bit", plan.no_resume))
        kept = None
        if not outcome.ok or any(check.ok is False for check in checks):
            kept = Path(tempfile.mkstemp(prefix="dpofit-smoke-", suffix=".log")[1]) if keep is None else log
            if keep is None and log.exists():
                shutil.copyfile(log, kept)
        return SmokeReport(plan, ranks, gpus, time.monotonic() - began, tuple(checks), outcome, kept)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            right = "Name a new folder; nothing is overwritten."
            raise BadInput(Problem(str(keep), "--keep", "exists and is not an empty folder", right))
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="dpofit-smoke-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _refuse_unbuildable(recipe: Recipe, folder: str) -> None:
    """BadInput for an offloaded optimizer where torch's linker line breaks (preflight/host.py says why)."""
    if recipe.zero is not None and recipe.zero.offload_optimizer != "none" and " " in folder:
        wrong = f"offloads the optimizer, which can't be compiled: torch lies in a path with spaces ({folder})"
        right = "Make the virtual environment in a path without spaces."
        raise BadInput(Problem(str(recipe.source), "deepspeed", wrong, right))


def _write_assets(folder: Path, plan: SmokePlan, config: dict) -> None:
    shutil.copytree(ASSETS / "tokenizer", folder / "model", dirs_exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "data").mkdir(exist_ok=True)
    for path in ASSETS.glob("*.json"):
        shutil.copyfile(path, folder / "data" / path.name)
    (folder / "recipe.json").write_text(json.dumps(dict(plan.settings), indent=1))


def _variables(read: ReadRecipe, gpus: int, ranks: int, folder: Path) -> tuple[Variable, ...]:
    assert read.recipe is not None
    cores = len(os.sched_getaffinity(0))
    if gpus:
        variables = list(launch_variables(read.recipe, os.environ, ranks, cores))
    else:
        variables = list(cpu_variables(ranks, cores))
    variables += [
        Variable("DPOFIT_SMOKE", str(folder), "the smoke run's folder"),
        Variable(VARIABLE, written(read.recipe.long_context), "the recipe's long-context pieces"),
        Variable("HF_DATASETS_CACHE", str(folder / "cache"), "nothing of yours is touched"),
        Variable("WANDB_MODE", "disabled", "nothing from the network"),
        Variable("PET_LOG_DIR", str(folder / "torchrun"), "nothing of yours is touched"),  # torchrun's --log-dir
        Variable("MPLCONFIGDIR", str(CACHE / "matplotlib"), "nothing of yours is touched"),
        Variable("TRITON_CACHE_DIR", str(CACHE / "triton"), "nothing of yours is touched"),
    ]
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    variables += [Variable(name, "1", "nothing from the network") for name in offline]
    switches = ("USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB", "USE_RAY", "USE_MCA")
    variables += [Variable(name, "0", "nothing from the network") for name in switches if name in os.environ]
    return tuple(variables)


def _job(
    folder: Path, variables: tuple[Variable, ...], ranks: int, deepspeed: bool, overrides: Sequence[str], name: str
) -> Plan:
    recipe = folder / "recipe.json"
    if ranks == 1 and not deepspeed:
        command = single_command(recipe, overrides)
    else:
        command = torchrun_command(Topology(processes=ranks), recipe, overrides, free_port())
    return Plan(command, variables, folder, folder / "state", folder / "output", str(recipe), f"smoke {name}")


def _train_checks(folder: Path, plan: SmokePlan) -> list[Check]:
    result = _result(folder, "train")
    if result is None:
        return []
    losses = result["losses"]
    checks = []
    if losses:
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        if plan.first_loss is None:
            ok: bool | None = all(math.isfinite(loss) for loss in losses) or False
            checks.append(Check("first loss", ok, f"finite ({plan.first_loss_why})", shown))
        else:
            ok = abs(losses[0] - plan.first_loss) <= LOSS_TOLERANCE * max(1.0, plan.first_loss)
            checks.append(Check("first loss", ok, f"{plan.first_loss:.4f} = {plan.first_loss_why}", shown))
    else:
        checks.append(Check("first loss", False, "a logged loss", "none"))
    moved = Check("training moves the weights", result["moved"] > 0, "some tensors", f"{result['moved']} tensors")
    checks.append(moved)
    checks.append(_loads("saved model loads in transformers, equal to what was trained", result))
    for name in (f"checkpoint-{SAVE_STEPS}", ""):
        errors = [f.title for f in check_checkpoint(folder / "output" / name) if f.severity == "error"]
        checks.append(Check(f"{name or 'final model'} verifies", not errors, "no error", "; ".join(errors) or "whole"))
    return checks


def _resume_checks(folder: Path, gpus: int) -> list[Check]:
    result, first = _result(folder, "resume"), _result(folder, "train")
    if result is None or first is None:
        return []
    name = "resume ends where the uninterrupted run ended"
    apart = result.get("apart")
    cpu_adam = result["optimizer"] == "DeepSpeedCPUAdam"
    if apart is None:
        check = Check(name, False, "equal weights", "were not compared")
    elif apart["differ"] == 0:
        check = Check(name, True, "equal weights", "bit for bit")
    elif gpus:  # GPU kernels add in any order: the loss of the repeated step must agree
        before, after = first["losses"][-1], result["losses"][-1]
        close = math.isclose(before, after, rel_tol=1e-2)
        check = Check(name, close, f"loss {before:.4f}", f"loss {after:.4f}, weights not bit for bit")
    else:
        seen = f"{apart['differ']:,} of {apart['values']:,} differ, {apart['beyond']:,} by more than rounding"
        few = apart["differ"] <= MAX_ROUNDED * apart["values"]
        expected = "equal up to the rounding of DeepSpeed's CPU Adam after a resume" if cpu_adam else "equal weights"
        check = Check(name, cpu_adam and few and apart["beyond"] == 0, expected, seen)
    return [check, _loads("resumed model loads in transformers, equal to what was trained", result)]


def _loads(name: str, result: dict) -> Check:
    if "loaded" not in result:
        return Check(name, False, "every trained tensor", "was not loaded")
    same, different = result["loaded"], result["different"]
    seen = f"{same} tensors" if not different else f"{len(different)} tensors differ, such as {different[0]}"
    return Check(name, same > 0 and not different, "every trained tensor", seen)


def _result(folder: Path, run: str) -> dict | None:
    path = folder / f"result.{run}.json"
    return json.loads(path.read_text()) if path.exists() else None
