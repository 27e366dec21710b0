"""What would run: the command, its variables with reasons, job files; nothing the user had is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dpofit.launch.build_lock import left_locks, remove_left_locks
from dpofit.launch.environment import launch_variables, masked
from dpofit.launch.output_dir import output_dir_problems, record
from dpofit.launch.plan import read_plan, torchrun_command
from dpofit.launch.state import last_run, outcome
from dpofit.launch.topology import Topology
from dpofit.recipe.load import load_recipe
from tests.launch.runs import dpofit, environment, write_run

DOCS = Path(__file__).parents[2] / "docs"


def plain(**variables: str) -> dict[str, str]:
    return {name: value for name, value in environment(**variables).items() if name != "DPOFIT_CPU_RANKS"}


def test_torchruns_command_for_one_of_several_nodes(tmp_path: Path) -> None:
    topology = Topology(4, 1, 8, "10.0.0.1", 29500)
    command = torchrun_command(topology, tmp_path / "my recipe.yaml", ["learning_rate=1e-6"], None)
    assert command == (
        sys.executable, "-m", "dpofit.train.torchrun", "--nnodes", "4", "--node-rank", "1", "--nproc-per-node", "8",
        "--master-addr", "10.0.0.1", "--master-port", "29500", "-m", "dpofit.train", f"{tmp_path}/my recipe.yaml",
        "learning_rate=1e-6",
    )  # fmt: skip


def test_torchruns_command_for_an_elastic_job(tmp_path: Path) -> None:
    topology = Topology(2, 0, 8, "h", 29500, rdzv_id="job7", min_nodes=1, max_nodes=4, max_restarts=3)
    words = " ".join(torchrun_command(topology, tmp_path / "r.yaml", [], None))
    assert "--nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-backend c10d --rdzv-endpoint h:29500" in words
    assert "--max-restarts 3" in words


def test_expandable_segments_are_set_under_both_names() -> None:
    recipe = load_recipe("qwen2.5-72b-dpo/full-z3", environment={}).recipe
    values = {v.name: v.value for v in launch_variables(recipe, {}, 8, 96)}
    assert values["PYTORCH_CUDA_ALLOC_CONF"] == values["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert values["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1"
    assert "OMP_NUM_THREADS" not in values


def test_offload_gets_its_cores() -> None:
    recipe = load_recipe("qwen2.5-72b-dpo/full-z3-offload", environment={}).recipe
    found = next(v for v in launch_variables(recipe, {}, 8, 96) if v.name == "OMP_NUM_THREADS")
    assert (found.value, found.why) == ("12", "the optimizer runs on the CPU: 96 cores / 8 ranks; torchrun would set 1")


def test_what_the_user_exported_wins() -> None:
    process = {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512", "OPTIM_TORCH": "0"}
    recipe = load_recipe("qwen2.5-72b-dpo/full-z3-offload", environment=process).recipe
    assert launch_variables(recipe, process, 8, 96) == ()


def test_secrets_are_masked() -> None:
    assert [masked(name, "x") for name in ("HF_TOKEN", "WANDB_API_KEY", "swanlab_lark_secret", "NNODES")] == [
        "********", "********", "********", "x",
    ]  # fmt: skip


def test_dry_run_prints_a_script_that_bash_accepts(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", "hub_token=hf_secret", "--dry-run", cwd=folder, env=plain())
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout
    assert "-m dpofit.train.torchrun --nnodes 1 --node-rank 0 --nproc-per-node 8" in done.stdout
    assert "# memory: " in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    assert list(folder.iterdir()) == []


def test_dry_run_of_one_node_of_four(tmp_path: Path) -> None:
    env = plain(NNODES="4", NODE_RANK="3", MASTER_ADDR="10.0.0.1", NPROC_PER_NODE="8")
    guard = ("--guard-memory", "1GiB")
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", "--dry-run", "--json", *guard, cwd=tmp_path, env=env)
    document = json.loads(done.stdout)
    assert [row["value"] for row in document["environment"] if row["name"] == "DPOFIT_GUARD_MEMORY"] == ["1GiB"]
    assert (document["schema"], document["nodes"], document["node_rank"]) == ("dpofit.launch/1", 4, 3)
    assert document["command"][1:7] == ["-m", "dpofit.train.torchrun", "--nnodes", "4", "--node-rank", "3"]
    assert all(variable["why"] for variable in document["environment"])


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--smoke", "--detach"), "--smoke --detach: exclude each other"),
        (("--dry-run", "--emit", "slurm"), "--dry-run --emit: exclude each other"),
        (("--keep", "kept"), "--keep: works only with --smoke"),
        (("--dry-run", "--guard-memory", "8MiB"), "--guard-memory: 8MiB is out of range"),
    ],
)
def test_an_option_that_does_nothing_or_fails_later_is_refused(
    tmp_path: Path, options: tuple[str, ...], wrong: str
) -> None:
    done = dpofit("launch", "qwen2.5-7b-dpo/full-z3", *options, cwd=tmp_path, env=plain())
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: command line: {wrong}" in done.stderr


def test_a_smoke_run_overwrites_no_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    done = dpofit("launch", "qwen2.5-7b-dpo/full-z3", "--smoke", "--keep", tmp_path, cwd=tmp_path, env=plain())
    assert done.returncode == 2
    assert "exists and is not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["data"]


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"pid": 1}', '{"time": 1}'])
def test_state_files_that_a_full_disk_tore_are_no_run(tmp_path: Path, torn: str) -> None:
    for name in ("pid", "outcome.json", "plan.json"):
        (tmp_path / name).write_text(torn)
    assert (last_run(tmp_path), outcome(tmp_path), read_plan(tmp_path)) == (None, None, None)


def test_a_machine_without_gpus_is_told_what_it_can_do(tmp_path: Path) -> None:
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", cwd=tmp_path, env=plain(CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 2
    assert "--smoke` runs here" in done.stderr


def test_slurm_script_is_sound_and_matches_the_example(tmp_path: Path) -> None:
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", "--emit", "slurm", cwd=tmp_path, env=plain())
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    directives = dict(
        line[8:].strip().lstrip("-").partition("=")[::2]
        for line in done.stdout.splitlines()
        if line.startswith("#SBATCH")
    )
    assert (directives["nodes"], directives["ntasks-per-node"], directives["gpus-per-node"]) == ("4", "1", "8")
    example = (Path(__file__).parents[2] / "scripts/slurm/full-z3.sbatch").read_text()
    assert _without_paths(example) == _without_paths(done.stdout)


def test_slurm_script_runs_the_launch_on_every_node(tmp_path: Path) -> None:
    """srun and scontrol replaced by shell functions that behave as on a job of two nodes."""
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", "--emit", "slurm", cwd=tmp_path, env=plain(NNODES="2"))
    stand_ins = (
        "scontrol() { printf 'gpu003\\ngpu004\\n'; }\n"
        'srun() { shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" --dry-run --json; done; }\n'
        f"dpofit() {{ '{sys.executable}' -c 'from dpofit.cli.app import main; main()' \"$@\"; }}\n"
        "export SLURM_JOB_NODELIST='gpu[003-004]' SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2\n"
    )
    ran = subprocess.run(["bash"], input=stand_ins + done.stdout, capture_output=True, text=True, env=plain())
    assert ran.returncode == 0, ran.stderr
    decoder, text, nodes = json.JSONDecoder(), ran.stdout.strip(), []
    while text:
        document, end = decoder.raw_decode(text)
        nodes.append(document)
        text = text[end:].strip()
    assert [(node["nodes"], node["node_rank"], node["processes_per_node"]) for node in nodes] == [(2, 0, 8), (2, 1, 8)]
    assert all("gpu003" in node["command"] and "20042" in node["command"] for node in nodes)


def test_kubernetes_manifest_has_what_a_pytorchjob_needs(tmp_path: Path) -> None:
    done = dpofit("launch", "qwen2.5-72b-dpo/full-z3", "--emit", "kubernetes", cwd=tmp_path, env=plain())
    manifest = yaml.safe_load(done.stdout)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(manifest, json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text()))
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    assert (specs["Master"]["replicas"], specs["Worker"]["replicas"], manifest["spec"]["nprocPerNode"]) == (1, 3, "8")
    container = specs["Worker"]["template"]["spec"]["containers"][0]
    assert container["command"][:2] == ["dpofit", "launch"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "2000Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    example = yaml.safe_load((Path(__file__).parents[2] / "scripts/kubernetes/full-z3.yaml").read_text())
    assert example["spec"]["nprocPerNode"] == manifest["spec"]["nprocPerNode"]
    assert example["kind"] == manifest["kind"]


def test_checkpoints_of_another_recipe_are_not_trained_over(tmp_path: Path) -> None:
    full = load_recipe("qwen2.5-7b-dpo/full-z3", environment={}).recipe
    lora = load_recipe("qwen2.5-7b-dpo/lora-ddp", environment={}).recipe
    record(full, tmp_path)
    assert output_dir_problems(lora, tmp_path) == []  # nothing saved yet
    (tmp_path / "checkpoint-200").mkdir()
    (tmp_path / "checkpoint-200" / "config.json").touch()
    assert output_dir_problems(full, tmp_path) == []
    (problem,) = output_dir_problems(lora, tmp_path)
    assert "finetuning_type 'full', now 'lora'" in problem.wrong
    (tmp_path / "dpofit" / "recipe.json").unlink()
    (problem,) = output_dir_problems(lora, tmp_path)
    assert problem.wrong == "checkpoint-200 is a whole model, this recipe trains finetuning_type: lora"


def test_locks_of_killed_builds_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead, living = tmp_path / "cpu_adam" / "lock", tmp_path / "py311_cpu" / "async_io" / "lock"
    for lock in (dead, living):
        lock.parent.mkdir(parents=True)
        lock.touch()
    with living.open():
        assert left_locks(tmp_path) == (dead,)
        assert remove_left_locks(tmp_path) == (dead,)
    assert living.exists() and not dead.exists()


def test_every_preflight_finding_is_documented() -> None:
    import re

    sources = (Path(__file__).parents[2] / "tools/dpofit/launch").rglob("*.py")
    used = {match for path in sources for match in re.findall(r'"(launch\.[a-z-]+)"', path.read_text())}
    documented = set(re.findall(r"^\| `(launch\.[a-z-]+)`", (DOCS / "preflight.md").read_text(), re.M))
    assert used == documented


def _without_paths(script: str) -> list[str]:
    return [line for line in script.strip().splitlines() if not line.startswith(("cd ", "srun "))]


def test_without_gpus_the_forecast_is_for_the_cluster_that_a_copied_recipe_is_written_for(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    assert dpofit("copy", "qwen2.5-72b-dpo/full-z3", folder, cwd=tmp_path).returncode == 0
    here, eight = (
        dpofit("launch", folder, "--dry-run", cwd=tmp_path, env=plain(CUDA_VISIBLE_DEVICES="", **more)).stdout
        for more in ({}, {"NNODES": "8", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    )
    said = "h200-141g (assumed: the recipe is written for it), rows of 9,216 tokens"
    assert f"; 4 x 8 {said}" in here
    assert f"; 8 x 8 {said}" in eight
    assert here.startswith("# no GPU here; one node, 8 processes (assumed where NNODES and NPROC_PER_NODE say nothing)")


def test_without_gpus_and_without_a_card_command_and_forecast_assume_the_same(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "run", tiny_model)
    env = plain(CUDA_VISIBLE_DEVICES="", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", NPROC_PER_NODE="4")
    said = dpofit("launch", recipe, "--dry-run", cwd=tmp_path, env=env).stdout
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4" in said
    assert "; 2 x 4 a100-80g (assumed: no GPU here, and no card says what the recipe is written for), rows of" in said


def test_long_context_pieces_reach_the_ranks_and_the_schedulers_file(tmp_path: Path) -> None:
    long = load_recipe("qwen2.5-72b-dpo/full-z3-long", environment={}).recipe
    found = next(v for v in launch_variables(long, {}, 8, 96) if v.name == "DPOFIT_LONG_CONTEXT")
    assert found.value == "answer_logps,shared_prompt,cached_reference,tiled_mlp,offload_checkpoints"
    stock = load_recipe("qwen2.5-72b-dpo/full-z3", environment={}).recipe
    assert "DPOFIT_LONG_CONTEXT" not in {v.name for v in launch_variables(stock, {}, 8, 96)}
    asked = ("qwen2.5-72b-dpo/full-z3-long", "--emit", "slurm", "--long-context")
    for pieces, exported in (("tiled_mlp", "tiled_mlp"), ("off", "off")):  # off must be said: the card has them on
        text = dpofit("launch", *asked, pieces, cwd=tmp_path, env=plain()).stdout
        assert f"\nexport DPOFIT_LONG_CONTEXT={exported}  #" in text
