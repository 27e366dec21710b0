"""What all ranks together reveal: shared cards, hosts that look alike, nodes that differ."""

from __future__ import annotations

from dataclasses import replace

from dpofit.launch.machine import Interface
from dpofit.launch.preflight.compare import compare, participant_from_json, participant_json, rank_table
from tests.preflight.machines import machine, node, single


def ids(participants: list) -> list[str]:
    return [finding.id for finding in compare(participants)]


def test_two_healthy_nodes_have_no_finding() -> None:
    assert compare([node(0), node(1)]) == ()


def test_two_machines_with_one_nccl_hostid_are_found_by_their_cards() -> None:
    same = {"NCCL_HOSTID": "node"}
    findings = compare([node(0, environment=same), node(1, environment=same)])
    # Boot ids differ here, so it can only be the variable.
    assert [finding.id for finding in findings] == ["launch.same-host-id"]
    assert "gpu00" in findings[0].evidence[0].where and "gpu01" in findings[0].evidence[1].where


def test_cloned_images_with_one_hostname_and_boot_id_are_found() -> None:
    clone = {"hostname": "gpu00", "boot_id": "0"}
    assert ids([node(0, **clone), node(1, **clone)]) == ["launch.same-host-id", "launch.same-hostname"]


def test_clones_without_visible_cards_are_told_apart_by_their_network_cards() -> None:
    clone = {"hostname": "gpu00", "boot_id": "0", "gpus": 0}
    assert "launch.same-host-id" in ids([node(0, **clone), node(1, **clone)])


def test_one_hostname_on_two_machines_is_a_warning() -> None:
    (finding,) = compare([node(0, hostname="train"), node(1, hostname="train")])
    assert (finding.id, finding.severity) == ("launch.same-hostname", "warning")


def test_a_loop_over_gpus_with_its_own_device_each_is_fine() -> None:
    here = machine(4)
    assert compare([single(rank, here, str(rank)) for rank in range(4)]) == ()


def test_a_loop_that_names_one_gpu_twice_is_found_with_both_ranks() -> None:
    here = machine(4)
    (finding,) = compare([single(0, here, "0"), single(1, here, "1"), single(2, here, "1")])
    assert finding.id == "launch.duplicate-gpu"
    assert finding.title == "ranks 1 and 2 share one GPU (GPU-00000001-0000-0000-0000-000000000000)"


def test_containers_that_share_a_card_are_named() -> None:
    here = machine(1)
    one, other = replace(here, hostname="pod-a"), replace(here, hostname="pod-b")
    finding = next(f for f in compare([single(0, one, None), single(1, other, None)]) if f.id == "launch.duplicate-gpu")
    assert "pod-a and pod-b are containers on one machine" in finding.cause


def test_unequal_nodes_versions_and_settings_are_errors() -> None:
    slow = node(1, 4, versions={"torch": "2.5.1"}, environment={"NCCL_IB_DISABLE": "1"})
    found = ids([node(0, 8, versions={"torch": "2.6.0"}), slow])
    assert set(found) == {"launch.unequal-nodes", "launch.versions-differ", "launch.settings-differ"}


def test_a_path_that_one_node_lacks_is_found() -> None:
    one, other = node(0), node(1)
    paths = [replace(one, paths={"/data/model": True}), replace(other, paths={"/data/model": False})]
    (finding,) = compare(paths)
    assert (finding.id, finding.evidence[0].where) == ("launch.path-not-everywhere", "gpu01")


def test_ranks_without_a_card_are_found() -> None:
    assert "launch.more-ranks-than-gpus" in ids([node(0, 8, gpus=4)])


def test_the_rank_table_is_in_order_of_ranks() -> None:
    rows = rank_table([node(1, 2), node(0, 2)])
    assert [row[:3] for row in rows] == [
        ("0", "gpu00", "0"),
        ("1", "gpu00", "1"),
        ("2", "gpu01", "0"),
        ("3", "gpu01", "1"),
    ]
    assert rows[3][3:] == ("1 NVIDIA A100-SXM4-80GB GPU-00010001", "00000000:0F:00.0")


def test_what_is_sent_comes_back_the_same() -> None:
    sent = node(3, 2, interfaces=(Interface("ib0", ("fe80::1",), "aa:bb"),), infiniband=("mlx5_0",))
    assert participant_from_json(participant_json(sent)) == sent
