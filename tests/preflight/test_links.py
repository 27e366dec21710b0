"""Preflight says how GPUs are joined, and measures it where nccl-tests is installed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from dpofit.findings import Finding
from dpofit.launch.bandwidth import Bandwidth, measure_all_reduce
from dpofit.launch.inventory import Inventory, Link
from dpofit.launch.machine import Machine, machine_from_json, machine_json
from dpofit.launch.preflight.links import bandwidth_findings, link_findings
from dpofit.launch.starts import read_start
from tests.preflight.machines import card, machine

# The lines that nccl-tests prints below its table.
OUTPUT = """# nThread 1 nGpus 8 minBytes 268435456 maxBytes 268435456
   268435456      67108864     float     sum      -1   2012.3  133.40  233.45      0   2015.0  133.22  233.13      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 233.291
#
"""


def joined(gpus: int, path: str, **others: str) -> Machine:
    """A node whose pairs are joined by `path`, except those named: `pair_0_1="SYS"`."""
    links = tuple(Link(a, b, others.get(f"pair_{a}_{b}", path)) for a, b in itertools.combinations(range(gpus), 2))
    cards = tuple(replace(card(number), nvlinks=12) for number in range(gpus))
    return machine(inventory=Inventory(cards, "550.54.15", (12, 4), links=links))


def found(here: Machine, visible: str | None = None) -> dict[str, Finding]:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return {finding.id: finding for finding in link_findings(here, read_start("torchrun train.py", environment))}


def test_one_line_counts_the_ways_and_a_row_per_gpu_shows_them():
    links = found(joined(3, "NV"))["launch.links"]
    assert links.title == "ways between 3 GPUs: 3 by NVLink"
    assert links.evidence[1].text.split() == ["NV", "X", "NV"]


def test_bridged_pairs_are_a_slow_ring():
    here = joined(4, "SYS", pair_0_1="NV", pair_2_3="NV")
    uneven = found(here)["launch.nvlink-not-everywhere"]
    assert uneven.title == "4 of 6 pairs of GPUs have no NVLink"
    assert set(found(here, visible="2,3")) == {"launch.links"}


def test_a_link_that_is_down_is_seen_on_the_gpu_that_lacks_it():
    here = joined(3, "NV")
    cards = (here.inventory.cards[0], replace(here.inventory.cards[1], nvlinks=11), here.inventory.cards[2])
    here = replace(here, inventory=replace(here.inventory, cards=cards))
    down = found(here)["launch.nvlink-down"]
    assert [(seen.where, seen.text) for seen in down.evidence] == [("GPU 1", "11 links up")]


def test_one_gpu_has_no_ways():
    assert found(joined(4, "NV"), visible="2") == {}


def test_links_reach_the_other_nodes_unchanged():
    here = joined(2, "PXB")
    assert machine_from_json(machine_json(here)).inventory == here.inventory


def test_bandwidth_is_what_nccl_tests_says(tmp_path: Path):
    program = tmp_path / "all_reduce_perf"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{OUTPUT}END\n")
    program.chmod(0o755)
    measured = measure_all_reduce(8, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert measured.bus_gb_per_s == 233.291
    assert measured.command == "all_reduce_perf -b 256M -e 256M -n 5 -w 2 -g 8"


def test_a_failing_or_absent_nccl_tests_says_so(tmp_path: Path):
    program = tmp_path / "all_reduce_perf"
    program.write_text("#!/bin/sh\necho 'Test NCCL failure common.cu:958' >&2\nexit 3\n")
    program.chmod(0o755)
    failed = measure_all_reduce(2, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (failed.bus_gb_per_s, failed.error) == (None, "exit code 3: Test NCCL failure common.cu:958")
    absent = measure_all_reduce(2, {"PATH": str(tmp_path / "elsewhere")})
    [finding] = bandwidth_findings(joined(2, "NV"), absent)
    assert (finding.id, finding.severity) == ("launch.bandwidth-not-measured", "info")


def test_pcie_speed_over_nvlink_is_a_warning_and_over_pcie_is_not():
    slow = Bandwidth("all_reduce_perf", 12.5)
    assert [f.id for f in bandwidth_findings(joined(8, "NV"), slow)] == ["launch.bandwidth-low"]
    assert [f.id for f in bandwidth_findings(joined(8, "PHB"), slow)] == ["launch.bandwidth"]
