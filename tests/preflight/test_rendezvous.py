"""`dpofit preflight --rendezvous` over real gloo: processes on this machine, and hosts in network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.runs import until

pytestmark = pytest.mark.stack
PREFLIGHT = [sys.executable, "-c", "from dpofit.cli.app import main; main()", "preflight", "--json"]
JOB_VARIABLES = (
    "NNODES",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NPROC_PER_NODE",
    "LOCAL_RANK",
)


def begin(arguments: list[str], inside: list[str] | None = None, **variables: str) -> subprocess.Popen:
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    return subprocess.Popen(
        [*(inside or []), *PREFLIGHT, *arguments], env={**env, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answers(processes: list[subprocess.Popen]) -> list[dict[str, Any]]:
    outputs = [process.communicate(timeout=180) for process in processes]
    return [json.loads(out) if out else pytest.fail(err) for out, err in outputs]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ids(answer: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in answer["findings"]} - {"launch.no-gpu"}  # this machine may have none


def test_a_loop_over_gpus_meets_and_numbers_its_ranks() -> None:
    address = f"127.0.0.1:{free_port()}"
    both = answers(
        [begin(["--rendezvous", address], RANK=str(r), WORLD_SIZE="2", CUDA_VISIBLE_DEVICES=str(r)) for r in (0, 1)]
    )
    for answer in both:
        assert [row["rank"] for row in answer["ranks"]] == ["0", "1"]
        assert {row["host"] for row in answer["ranks"]} == {socket.gethostname()}


def test_two_nodes_with_one_number_are_found_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    variables = {"NNODES": "3", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    arguments = ["--rendezvous", address, "--timeout", "60"]
    for answer in answers([begin(arguments, **variables, NODE_RANK=number) for number in ("0", "1", "1")]):
        assert "launch.duplicate-rank" in ids(answer)


def test_a_node_that_does_not_come_is_named() -> None:
    variables = {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    (answer,) = answers([begin(["--rendezvous", f"127.0.0.1:{free_port()}", "--timeout", "2"], **variables)])
    finding = next(f for f in answer["findings"] if f["id"] == "launch.node-missing")
    assert "participants 1, 2 of 3 did not come" in finding["title"]


def test_an_address_that_leads_nowhere_is_told() -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    (answer,) = answers([begin(["--rendezvous", f"127.0.0.1:{free_port()}", "--timeout", "2"], **variables)])
    assert "launch.rendezvous-failed" in ids(answer)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[list[str], list[str], str]]:
    """Command prefixes that run inside two network namespaces joined by a cable, and the first one's address."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for network namespaces")
    tag = uuid.uuid4().hex[:6]
    names = [f"dpo{tag}a", f"dpo{tag}b"]
    cable = [f"v{tag}a", f"v{tag}b"]

    def ip(*words: str) -> str:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", cable[number])
            ip("-n", name, "link", "set", cable[number], "up")
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(names):
            until(lambda n=name, c=cable[number]: "state UP" in ip("-n", n, "link", "show", c), "the cable", 10)
        inside = [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={cable[n]}"] for n, name in enumerate(names)
        ]
        yield inside[0], inside[1], "10.77.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_meet_over_the_network_and_clones_are_found(two_hosts: tuple[list[str], list[str], str]) -> None:
    """The namespaces share hostname and boot id, as cloned images do, but not their network cards."""
    one, other, address = two_hosts
    port = free_port()
    variables = {"NNODES": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    arguments = ["--rendezvous", f"{address}:{port}"]
    both = answers([begin(arguments, inside, NODE_RANK=str(n), **variables) for n, inside in enumerate((one, other))])
    for answer in both:
        assert [(row["rank"], row["local_rank"]) for row in answer["ranks"]] == [
            ("0", "0"), ("1", "1"), ("2", "0"), ("3", "1"),
        ]  # fmt: skip
        assert {"launch.same-host-id", "launch.same-hostname"} <= ids(answer)


def test_a_hostid_of_ones_own_tells_clones_apart(two_hosts: tuple[list[str], list[str], str]) -> None:
    one, other, address = two_hosts
    arguments = ["--rendezvous", f"{address}:{free_port()}"]
    variables = {"NNODES": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "1"}
    both = answers(
        [begin(arguments, inside, NODE_RANK=str(n), NCCL_HOSTID=f"node{n}", **variables)
         for n, inside in enumerate((one, other))]
    )  # fmt: skip
    assert all("launch.same-host-id" not in ids(answer) for answer in both)


def test_each_nodes_own_master_address_is_found_before_anyone_waits(
    two_hosts: tuple[list[str], list[str], str],
) -> None:
    _, other, _ = two_hosts
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.77.0.2", "MASTER_PORT": str(free_port())}
    (answer,) = answers([begin([], other, NPROC_PER_NODE="1", **variables)])
    assert "launch.master-address" in ids(answer)
