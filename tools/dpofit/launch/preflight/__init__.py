"""Finds in seconds what NCCL or the first save would say an hour later: here locally, in compare.py over all ranks."""

from __future__ import annotations

import os
from pathlib import Path

from dpofit.findings import Finding
from dpofit.launch.machine import Machine, read_machine
from dpofit.launch.preflight.devices import device_findings
from dpofit.launch.preflight.host import host_findings
from dpofit.launch.preflight.links import link_findings
from dpofit.launch.preflight.network import network_findings
from dpofit.launch.preflight.paths import path_findings
from dpofit.launch.starts import Start, start_of_environment
from dpofit.launch.topology import Topology
from dpofit.recipe.load import ReadRecipe

_ORDER = {"error": 0, "warning": 1, "info": 2}


def local_findings(
    found: ReadRecipe | None,
    topology: Topology | None = None,
    *,
    start: Start | None = None,
    machine: Machine | None = None,
    checkpoint_bytes: int | None = None,
    gpus: bool = True,
) -> tuple[Finding, ...]:
    """Everything this machine alone can tell, errors first. `checkpoint_bytes`: one checkpoint, as predicted.
    `gpus` False: a job on the CPU."""
    machine = machine or read_machine()
    start = start or start_of_environment(os.environ)
    findings = [
        *(device_findings(machine, start, found) if gpus else ()),
        *(link_findings(machine, start) if gpus else ()),
        *network_findings(machine, start, topology),
        *host_findings(machine, start, found),
    ]
    if found is not None:
        findings += path_findings(found, Path.cwd(), checkpoint_bytes)
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))
