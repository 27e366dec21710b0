"""Public launch failures (benchmarks/cases/reports_launch.json): preflight finds each that could be seen beforehand."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpofit.findings import Finding
from dpofit.launch.inventory import Inventory
from dpofit.launch.machine import Interface, Machine
from dpofit.launch.preflight import local_findings
from dpofit.launch.preflight.compare import compare
from dpofit.launch.starts import read_start
from dpofit.recipe.load import read_recipe
from tests.preflight.machines import card, machine, node, single

CASES = {case["id"]: case for case in json.loads(
    (Path(__file__).parents[2] / "benchmarks/cases/reports_launch.json").read_text())}  # fmt: skip


def start(command: str, here: Machine | None = None, **environment: str) -> tuple[Finding, ...]:
    """Local findings for a start command on `here` (8 GPUs unless given)."""
    return local_findings(None, start=read_start(command, environment), machine=here or machine())


def in_use(command: str) -> tuple[Finding, ...]:
    """The same with a port that somebody listens on; PORT in the command."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        return start(command.replace("PORT", str(other.getsockname()[1])))


def in_terminal(command: str) -> tuple[Finding, ...]:
    """The same, typed into a terminal without nohup."""
    return local_findings(None, start=replace(read_start(command, {}), terminal=True), machine=machine())


def big_dataset(tmp_path: Path) -> tuple[Finding, ...]:
    (tmp_path / "pairs.json").touch()
    with (tmp_path / "pairs.json").open("r+b") as file:
        file.truncate(3 * 10**9)  # sparse
    (tmp_path / "dataset_info.json").write_text('{"pairs": {"file_name": "pairs.json", "ranking": true}}')
    overrides = ["dataset=pairs", f"dataset_dir={tmp_path}", "ddp_timeout=1800", "preprocessing_num_workers=1"]
    return local_findings(read_recipe("qwen2.5-7b-dpo/full-z3", overrides), machine=machine())


NODE = machine()
LOGGED = "> log 2>&1 &"
NOHUP = f"nohup torchrun --nproc_per_node 8 train.py {LOGGED}"
HERE = "llamafactory-cli train x.yaml"
# What each report says about how the job was started, and the finding it should have been given.
SEEN: dict[str, tuple[str, Callable[..., tuple[Finding, ...]]]] = {
    "c001": ("launch.sighup", lambda: start(NOHUP)),
    "c002": ("launch.more-ranks-than-gpus", lambda: start("torchrun --nproc_per_node 2 train.py", machine(1))),
    "c003": ("launch.duplicate-gpu", lambda: compare([single(0, NODE, "0"), single(3, NODE, "0")])),
    "c006": (
        "launch.slurm-tasks",
        lambda: start("srun accelerate launch --num_processes 8 train.py", machine(2), SLURM_NTASKS_PER_NODE="4"),
    ),
    "c007": ("launch.duplicate-gpu", lambda: compare([single(5, NODE, "1"), single(7, NODE, "1")])),
    "c010": ("launch.duplicate-gpu", lambda: compare([single(7, NODE, None, 7), single(15, NODE, None, 7)])),
    "c011": ("launch.duplicate-gpu", lambda: compare([single(1, NODE, None, 1), single(9, NODE, None, 1)])),
    "c014": (
        "launch.same-hostname",
        lambda: compare([node(0, hostname="gpu.rack1"), node(1, hostname="gpu.rack2")]),
    ),
    "c020": ("launch.duplicate-gpu", lambda: compare([single(0, NODE, None), single(2, NODE, None)])),
    "c023": ("launch.sighup", lambda: start("nohup torchrun --nproc_per_node 4 train.py &", machine(4))),
    "c025": ("launch.sighup", lambda: start(f"nohup accelerate launch --gpu_ids 2,3 --num_processes 2 x.py {LOGGED}")),
    "c026": (
        "launch.sighup",
        lambda: start(f"FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 nohup {HERE} {LOGGED}"),
    ),
    "c027": ("launch.sighup", lambda: in_terminal(HERE)),
    "c030": ("launch.sighup", lambda: start("nohup python -m torch.distributed.launch --nproc_per_node=8 main.py &")),
    "c032": ("launch.more-ranks-than-gpus", lambda: start("accelerate launch --num_processes 2 x.py", machine(1))),
    "c037": ("launch.tokenizing-outlasts-timeout", big_dataset),
    "c040": ("launch.port-in-use", lambda: in_use("deepspeed --num_gpus 8 --master_port PORT train.py")),
    "c042": ("launch.port-in-use", lambda: in_use("torchrun --nproc_per_node 4 --master_port PORT finetuning.py")),
    "c046": ("launch.deepspeed-ignores-visible-devices", lambda: start("CUDA_VISIBLE_DEVICES=1 deepspeed train.py")),
    "c047": ("launch.deepspeed-ignores-visible-devices", lambda: start("CUDA_VISIBLE_DEVICES=0,2 deepspeed x.py")),
    "c048": (
        "launch.deepspeed-ignores-visible-devices",
        lambda: start("deepspeed train.py", CUDA_VISIBLE_DEVICES="0,1,6,7"),
    ),
    "c051": (
        "launch.deepspeed-ignores-visible-devices",  # what accelerate before 0.13 ran for --num_processes 4
        lambda: start("deepspeed --num_gpus 4 x.py", CUDA_VISIBLE_DEVICES="2,4,5,7"),
    ),
    "c055": (
        "launch.deepspeed-ignores-visible-devices",
        lambda: start("deepspeed --num_gpus 2 --num_nodes 1 x.py", CUDA_VISIBLE_DEVICES="2,3"),
    ),
    "c057": ("launch.unequal-nodes", lambda: compare([node(0, 8), replace(node(1, 1))])),
    "c059": ("launch.rank-instead-of-node-rank", lambda: start(HERE, FORCE_TORCHRUN="1", NNODES="3", RANK="1")),
    "c060": (
        "launch.no-such-interface",
        lambda: start("torchrun --nproc_per_node=6 x.py", machine(6), NCCL_SOCKET_IFNAME="bond0", NCCL_IB_DISABLE="1"),
    ),
    "c061": (
        "launch.rank-instead-of-node-rank",
        lambda: start(f"FORCE_TORCHRUN=1 NNODES=2 RANK=1 CUDA_VISIBLE_DEVICES=1,2,3,4 {HERE}"),
    ),
    "c064": ("launch.no-launcher", lambda: start("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift rlhf --rlhf_type dpo")),
    "c067": ("launch.shm-small", lambda: start("torchrun --nproc_per_node 8 x.py", machine(shm_bytes=64 * 2**20))),
    "c071": ("launch.sighup", lambda: start(NOHUP)),
}  # fmt: skip
# Nothing in these could be told before the start.
UNSEEN = {
    "c013": "a rank exits 1, cause not in the report",
    "c035": "an all-reduce times out in training, cause not established",
    "c038": "an all-reduce times out in training, cause not established",
    "c039": "an all-reduce times out at step 616, cause not established",
    "c043": "killed at start, cause not established",
    "c066": "a start that works",
    "c070": "NCCL chose another interface than the user wanted; both exist",
}


def test_every_report_is_accounted_for() -> None:
    assert set(SEEN) | set(UNSEEN) == set(CASES)
    assert not set(SEEN) & set(UNSEEN)


@pytest.mark.parametrize("case", SEEN)
def test_report_gets_its_finding(case: str, tmp_path: Path) -> None:
    expected, seen = SEEN[case]
    found = seen(tmp_path) if seen is big_dataset else seen()
    assert expected in {finding.id for finding in found}, found
    finding = next(finding for finding in found if finding.id == expected)
    assert finding.evidence and finding.cause and finding.fix


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 8 train.py",
        "torchrun --nproc-per-node=gpu train.py",
        "python -m torch.distributed.launch --nproc_per_node=8 train.py",
        "CUDA_VISIBLE_DEVICES=4,5 torchrun --nproc_per_node 2 train.py",
        "accelerate launch --num_processes 8 --main_process_port 29555 train.py",
        "deepspeed --include localhost:0,3 train.py",
        "llamafactory-cli train recipe.yaml",
        "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train recipe.yaml",
        "CUDA_VISIBLE_DEVICES=3 python train.py",
    ],
)
def test_a_start_that_works_gets_no_error_or_warning(command: str) -> None:
    assert [f.id for f in start(command) if f.severity != "info"] in ([], ["launch.port-in-use"])


def test_interfaces_follow_nccls_rules() -> None:
    here = machine(interfaces=(Interface("ens5", ("10.0.0.9",)), Interface("docker0", ("172.17.0.1",))))

    def missing(asked: str) -> bool:
        return any(f.id == "launch.no-such-interface" for f in start("torchrun x.py", here, NCCL_SOCKET_IFNAME=asked))

    assert [missing(asked) for asked in ("ens", "=ens5", "^docker,lo", "=ens", "eth0", "^ens,docker")] == [
        False, False, False, True, True, True,
    ]  # fmt: skip


def test_a_container_without_gpus_is_told_how_to_get_them() -> None:
    bare = machine(0, inventory=Inventory(error="NVML Shared Library Not Found"), in_container=True)
    finding = next(f for f in start("torchrun --nproc_per_node 8 x.py", bare) if f.id == "launch.no-gpu")
    assert finding.severity == "error"
    assert "--gpus all" in finding.fix


def test_a_busy_card_names_its_processes() -> None:
    cards = tuple(card(number, used_bytes=30 * 2**30 if number == 2 else 0) for number in range(8))
    busy = machine(inventory=Inventory(cards, "550.54.15", (12, 4)))
    (finding,) = [f for f in start("torchrun --nproc_per_node 8 x.py", busy) if f.id == "launch.gpu-busy"]
    assert finding.evidence[0].text == "pid 4244 30.0 GiB"


@pytest.mark.parametrize(("name", "capability", "seen"), [
    ("Tesla T4", (7, 5), {"config.bf16-hardware", "config.flash-attn-hardware"}), ("NVIDIA A10", (8, 6), set()),
])  # fmt: skip
def test_cards_before_ampere_are_told_what_they_cannot_do(name, capability, seen) -> None:
    old = replace(card(0, name=name), compute_capability=capability)
    found = read_recipe("qwen2.5-7b-dpo/lora-1gpu", ["flash_attn=fa2"])
    here = machine(inventory=Inventory((old,), "550.54.15", (12, 4)))
    findings = local_findings(found, start=read_start("torchrun --nproc_per_node 1 x.py", {}), machine=here)
    assert {finding.id for finding in findings} & {"config.bf16-hardware", "config.flash-attn-hardware"} == seen


def test_an_old_driver_is_an_error() -> None:
    old = machine(inventory=Inventory((card(0),), "470.82", (11, 4)), torch_cuda="13.0")
    assert "launch.driver-too-old" in {f.id for f in start("torchrun x.py", old)}


def test_visible_devices_out_of_range_or_twice() -> None:
    four = machine(4)
    assert "launch.visible-devices-out-of-range" in {
        f.id for f in start("torchrun x.py", four, CUDA_VISIBLE_DEVICES="0,5")
    }
    assert "launch.visible-devices-duplicate" in {
        f.id for f in start("torchrun x.py", four, CUDA_VISIBLE_DEVICES="1,1")
    }


@pytest.fixture
def hostfile(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "host file"
    path.write_text("worker-1 slots=8\nworker-2 slots=4  # half\n")
    yield path


def test_a_hostfile_with_unequal_slots_is_found(hostfile: Path) -> None:
    assert "launch.unequal-nodes" in {f.id for f in start(f"deepspeed --hostfile '{hostfile}' train.py")}


def test_offload_with_torch_in_a_path_with_spaces_is_found_before_the_compiler_fails() -> None:
    found = read_recipe("qwen2.5-72b-dpo/full-z3-offload")
    here = machine(torch_folder="/my venv/lib/python3.11/site-packages/torch")
    [finding] = [f for f in local_findings(found, machine=here) if f.id == "launch.cpu-adam-not-buildable"]
    assert finding.title == "offload can't be built: torch lies in a path with spaces"
    assert not [f for f in local_findings(found, machine=machine()) if f.id == "launch.cpu-adam-not-buildable"]
