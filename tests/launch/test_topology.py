"""Nodes and ranks from the names that LLaMA-Factory, Slurm and Kubeflow use."""

from __future__ import annotations

import pytest

from dpofit.errors import BadInput
from dpofit.launch.topology import Topology, first_host, read_topology, slurm_port


def test_one_node_takes_a_process_per_visible_gpu_and_leaves_the_port_open() -> None:
    assert read_topology({}, visible_gpus=4) == Topology(processes=4)


def test_llamafactorys_names() -> None:
    environment = {
        "NNODES": "4", "NODE_RANK": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511",
        "MAX_RESTARTS": "3",
    }  # fmt: skip
    assert read_topology(environment, 1) == Topology(4, 2, 8, "10.0.0.1", 29511, max_restarts=3, source="NNODES")


def test_elastic_names() -> None:
    environment = {"RDZV_ID": "job7", "NNODES": "2", "MIN_NNODES": "1", "MAX_NNODES": "4", "MASTER_ADDR": "h"}
    found = read_topology(environment, 8)
    assert (found.rdzv_id, found.min_nodes, found.max_nodes, found.elastic) == ("job7", 1, 4, True)


def test_kubeflows_names() -> None:
    environment = {
        "PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_NPROC_PER_NODE": "8", "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456", "RANK": "3", "WORLD_SIZE": "32",
    }  # fmt: skip
    found = read_topology(environment, 1)
    assert (found.nodes, found.node_rank, found.processes, found.master_addr) == (4, 3, 8, "job-master-0")


def test_slurms_names() -> None:
    environment = {
        "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[003-006]",
        "SLURM_JOB_ID": "4711042",
    }  # fmt: skip
    found = read_topology(environment, 8)
    assert (found.nodes, found.node_rank, found.master_addr, found.master_port) == (4, 1, "gpu003", 31042)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[003-010,012],login1", "gpu003"), ("n1,n2", "n1"), ("rack[1-2]-gpu", "rack1-gpu"), ("solo", "solo")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_slurm_ports_are_in_range() -> None:
    assert [slurm_port(job) for job in ("0", "19999", "20000", "123456789")] == [20000, 39999, 20000, 36789]


def test_every_wrong_value_is_told_at_once() -> None:
    environment = {"NNODES": "two", "NODE_RANK": "-1", "NPROC_PER_NODE": "0", "MASTER_PORT": "http"}
    with pytest.raises(BadInput) as caught:
        read_topology(environment, 8)
    assert [problem.key for problem in caught.value.problems] == [
        "NNODES",
        "NODE_RANK",
        "NPROC_PER_NODE",
        "MASTER_PORT",
    ]


def test_several_nodes_need_an_address_and_a_rank_below_their_number() -> None:
    with pytest.raises(BadInput) as caught:
        read_topology({"NNODES": "2", "NODE_RANK": "2"}, 8)
    assert [problem.key for problem in caught.value.problems] == ["MASTER_ADDR", "NODE_RANK"]
