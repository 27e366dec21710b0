"""The cluster flags become a Cluster, and every wrong flag is named at once."""

from __future__ import annotations

import pytest

from dpofit.errors import BadInput
from dpofit.hardware.flags import cluster_from


def test_flags_become_a_cluster() -> None:
    cluster = cluster_from("a100-80g", nodes=4, gpus_per_node=8, host_ram="1000GiB", disk="10TB")
    assert cluster.world_size == 32
    assert cluster.host_ram_bytes == 1000 * 2**30
    assert cluster.disk_bytes == 10 * 10**12


def test_what_is_not_given_stays_unknown_and_a_node_has_eight_cards() -> None:
    cluster = cluster_from("h20-96g")
    assert (cluster.nodes, cluster.gpus_per_node) == (1, 8)
    assert cluster.host_ram_bytes is None
    assert cluster.disk_bytes is None


def test_host_ram_auto_reads_this_machine() -> None:
    cluster = cluster_from("h20-96g", host_ram="auto")
    assert cluster.host_ram_bytes is not None
    assert cluster.host_ram_bytes > 2**30


def test_every_wrong_flag_is_named_at_once() -> None:
    with pytest.raises(BadInput) as refusal:
        cluster_from("a100", nodes=0, gpus_per_node=-1, host_ram="lots", disk="5")
    assert [problem.key for problem in refusal.value.problems] == [
        "--gpu", "--nodes", "--gpus-per-node", "--host-ram", "--disk",
    ]  # fmt: skip
