"""A ready job file for a scheduler that runs the same `dpofit launch`: an sbatch script or a PyTorchJob."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.launch.environment import Variable, catalogue_source, launch_variables, masked
from dpofit.launch.plan import masked_override
from dpofit.recipe.catalogue import written_for
from dpofit.recipe.environment import ALLOWED
from dpofit.recipe.load import ReadRecipe, load_recipe
from dpofit.recipe.long_context import VARIABLE, written

IMAGE = "registry.example/dpofit:latest"
_DEFAULT_GPUS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes and GPUs of the job, and a node's memory where the recipe's card names it (`1000GiB`)."""

    nodes: int
    gpus: int
    host_ram: str | None


def emitted(found: ReadRecipe, overrides: Sequence[str], kind: str) -> str:
    """The file's text. NNODES and NPROC_PER_NODE decide, else the cluster the recipe is written for, else 1 x 8."""
    assert found.recipe is not None
    recipe = found.recipe.source.resolve()
    # What this machine happens to export is no business of the cluster's.
    elsewhere = {name: value for name, value in os.environ.items() if not ALLOWED.fullmatch(name)}
    elsewhere[VARIABLE] = written(found.recipe.long_context)
    asked = load_recipe(str(recipe), overrides, elsewhere).recipe
    words = ["dpofit", "launch", str(recipe), *(masked_override(word) for word in overrides)]
    shape = _shape(recipe)
    name = re.sub(r"[^a-z0-9]+", "-", found.recipe.name.lower()).strip("-")[:50] or "dpofit"
    variables = launch_variables(asked, {}, shape.gpus, cores=shape.gpus, torchrun=False)
    write = _slurm if kind == "slurm" else _kubernetes
    return write(name, words, Path.cwd(), shape, variables)


def _shape(recipe: Path) -> Shape:
    written = written_for(catalogue_source(recipe))
    nodes, gpus = (os.environ.get(name, "") for name in ("NNODES", "NPROC_PER_NODE"))
    return Shape(
        int(nodes) if nodes.isdigit() and int(nodes) else written.nodes if written else 1,
        int(gpus) if gpus.isdigit() and int(gpus) else written.gpus_per_node if written else _DEFAULT_GPUS,
        written.host_ram if written else None,
    )


def _slurm(name: str, words: list[str], folder: Path, shape: Shape, variables: Sequence[Variable]) -> str:
    exports = "\n".join(
        f"export {variable.name}={shlex.quote(masked(variable.name, variable.value))}  # {variable.why}"
        for variable in variables
    )
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={shape.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={shape.gpus}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# One task a node: torchrun starts its {shape.gpus} ranks. Add --partition, --account, --time as your site asks.
set -euo pipefail

cd {shlex.quote(str(folder))}
{exports}

# Every node finds its number in SLURM_NODEID; address and port are the same on all.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT NPROC_PER_NODE={shape.gpus}

srun --kill-on-bad-exit=1 {shlex.join(words)}
"""


def _kubernetes(name: str, words: list[str], folder: Path, shape: Shape, variables: Sequence[Variable]) -> str:
    limits: dict[str, Any] = {"nvidia.com/gpu": shape.gpus}
    if shape.host_ram:
        limits["memory"] = shape.host_ram.replace("GiB", "Gi")
    container = {
        "name": "pytorch",
        "image": IMAGE,
        "command": words,
        "workingDir": str(folder),
        "env": [{"name": v.name, "value": masked(v.name, v.value)} for v in variables],
        "resources": {"limits": limits},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": str(folder)}],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "dpofit-runs"}},
    ]

    def replicas(count: int) -> dict[str, Any]:
        template = {"spec": {"containers": [container], "volumes": volumes}}
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    specs = {"Master": replicas(1)}
    if shape.nodes > 1:
        specs["Worker"] = replicas(shape.nodes - 1)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"nprocPerNode": str(shape.gpus), "pytorchReplicaSpecs": specs},
    }
    return (
        "# A PyTorchJob for Kubeflow's training operator, which sets PET_NNODES, PET_NODE_RANK, MASTER_ADDR.\n"
        f"# Yours to fill in: image (requirements.txt and dpofit installed), claimName (the volume of {folder}).\n"
        f"{_yaml(manifest)}"
    )


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    # Through JSON: shared parts are written out instead of as YAML anchors.
    return yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False, width=110, allow_unicode=True)
