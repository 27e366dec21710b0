"""Reads how a job is started (a command line and its variables) into how many ranks run here and on which cards."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpofit.errors import BadInput, Problem

LAUNCHERS = ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed", "llamafactory-cli", "dpofit", "python")


@dataclass(frozen=True, slots=True)
class Start:
    """How ranks come to be on this node. `processes` None: the launcher decides by what it sees.

    `slots` are device numbers the launcher hands out itself (deepspeed --include), `hosts` the slots of each host of a
    hostfile. `environment` is the process's with the command's own assignments over it.
    """

    launcher: str
    environment: Mapping[str, str]
    processes: int | None = None
    total_processes: int | None = None  # over all nodes (accelerate --num_processes)
    nodes: int | None = None
    node_rank: int | None = None
    slots: tuple[int, ...] | None = None
    filtered: bool = False  # deepspeed got --include, --exclude, --num_gpus or --num_nodes
    hosts: Mapping[str, int] = field(default_factory=dict)
    master_port: int | None = None
    hangup: bool = False  # nohup, or in the background of a terminal
    terminal: bool = False  # in the foreground of one that may be closed
    words: tuple[str, ...] = ()


def read_start(text: str, environment: Mapping[str, str], folder: Path = Path(".")) -> Start:
    """`CUDA_VISIBLE_DEVICES=0,2 deepspeed --include localhost:0,1 train.py …` → Start. BadInput when not understood.

    Understood: torchrun, python -m torch.distributed.launch or .run, accelerate launch, deepspeed, llamafactory-cli,
    dpofit launch, plain python; with nohup, srun, env, exec and a trailing & around them.
    """
    try:
        words = shlex.split(text, comments=False)
    except ValueError as error:
        raise BadInput(Problem("command line", "--start", f"is not a shell command: {error}", "")) from None
    env, hangup = dict(environment), False
    while words and (words[0] in ("nohup", "env", "exec", "time", "setsid") or _assignment(words[0])):
        if words[0] == "nohup":
            hangup = True
        elif assignment := _assignment(words[0]):
            env[assignment[0]] = assignment[1]
        words = words[1:]
    if "&" in words or (words and words[-1].endswith("&")):
        hangup = True
    words = [word for word in words if word not in ("&", "2>&1", ">")]
    if words and words[0] == "srun":
        position = next((i for i, word in enumerate(words[1:], 1) if _launcher(word)), 1)
        words = words[position:]
    launcher, rest = _which(words)
    if launcher is None:
        right = f"Start with one of {', '.join(LAUNCHERS)}."
        raise BadInput(Problem("command line", "--start", f"{text!r} is not a way to start that is known", right))
    options = _options(rest)
    build = {"deepspeed": _deepspeed, "accelerate": _accelerate}.get(launcher, _torchrun)
    return build(Start(launcher, env, hangup=hangup, words=tuple(words)), options, folder)


def start_of_environment(environment: Mapping[str, str]) -> Start:
    """How this very process was started: by a launcher that set RANK and LOCAL_RANK, or `dpofit launch` to come."""
    terminal = closable_terminal(environment)
    if "RANK" in environment and "LOCAL_RANK" in environment:
        local = _int(environment.get("LOCAL_WORLD_SIZE"))
        return Start("torchrun", environment, processes=local)
    return Start("dpofit", environment, processes=_int(environment.get("NPROC_PER_NODE")), terminal=terminal)


def closable_terminal(environment: Mapping[str, str]) -> bool:
    """Whether we sit in a terminal that ends with its window: not in tmux or screen."""
    return os.isatty(0) and not {"TMUX", "STY"} & set(environment)


def _torchrun(start: Start, options: Mapping[str, str], folder: Path) -> Start:
    env = start.environment
    if start.launcher in ("llamafactory-cli", "dpofit"):
        return replace(
            start, processes=_int(env.get("NPROC_PER_NODE")), nodes=_int(env.get("NNODES")),
            node_rank=_int(env.get("NODE_RANK")), master_port=_int(env.get("MASTER_PORT")),
        )  # fmt: skip
    if start.launcher == "python":
        return replace(start, processes=1)
    wanted = options.get("nproc_per_node", env.get("PET_NPROC_PER_NODE", "1"))
    return replace(
        start, processes=_int(wanted) if wanted not in ("auto", "gpu") else None,
        nodes=_int(options.get("nnodes", "1").rpartition(":")[2]),
        node_rank=_int(options.get("node_rank")), master_port=_int(options.get("master_port")),
    )  # fmt: skip


def _accelerate(start: Start, options: Mapping[str, str], folder: Path) -> Start:
    config: dict = {}
    if "config_file" in options:
        config = _yaml(folder / options["config_file"])
    env = dict(start.environment)
    chosen = options.get("gpu_ids", config.get("gpu_ids"))
    if chosen not in (None, "all"):
        env["CUDA_VISIBLE_DEVICES"] = str(chosen)  # accelerate commands/launch.py: gpu_ids becomes the variable
    total = _int(options.get("num_processes", config.get("num_processes")))
    nodes = _int(options.get("num_machines", config.get("num_machines", 1))) or 1
    rank = options.get("machine_rank", config.get("machine_rank", 0 if nodes == 1 else None))
    port = _int(options.get("main_process_port", config.get("main_process_port")))
    per_node = None if total is None else max(1, total // nodes)
    return replace(
        start, environment=env, processes=per_node, total_processes=total, nodes=nodes, node_rank=_int(rank),
        master_port=port,
    )  # fmt: skip


def _deepspeed(start: Start, options: Mapping[str, str], folder: Path) -> Start:
    filtered = bool({"include", "exclude", "num_gpus", "num_nodes"} & set(options))
    slots = None
    if match := re.search(r"(?:^|@)(?:localhost|127\.0\.0\.1):([0-9,]+)", options.get("include", "")):
        slots = tuple(int(number) for number in match[1].split(",") if number)
    hosts = _hostfile(folder / options["hostfile"]) if "hostfile" in options else {}
    processes = len(slots) if slots is not None else _int(options.get("num_gpus"))
    return replace(
        start, processes=processes, nodes=len(hosts) or _int(options.get("num_nodes")) or 1, slots=slots,
        filtered=filtered, hosts=hosts, master_port=_int(options.get("master_port")),
    )  # fmt: skip


def _hostfile(path: Path) -> dict[str, int]:
    """`host slots=8` lines (deepspeed launcher/runner.py)."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        wrong = f"can't be read ({error.strerror})"
        raise BadInput(Problem(str(path), "--hostfile", wrong, "Name the hostfile.")) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise BadInput(Problem(f"{path}:{number}", None, f"is not a host line: {line!r}", "Write: HOST slots=8"))
        if match[1] in hosts:
            raise BadInput(Problem(f"{path}:{number}", match[1], "is listed twice", "List each host once."))
        hosts[match[1]] = int(match[2])
    return hosts


def _which(words: Sequence[str]) -> tuple[str | None, list[str]]:
    if not words:
        return None, []
    name = Path(words[0]).name
    rest = list(words[1:])
    if re.fullmatch(r"python[0-9.]*", name):
        while rest and rest[0] in ("-u", "-O", "-B"):
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            module = rest[1]
            if module in ("torch.distributed.launch", "torch.distributed.run", "dpofit.train.torchrun"):
                return ("torch.distributed.launch" if module.endswith("launch") else "torchrun"), rest[2:]
            if module.startswith("accelerate."):
                return "accelerate", rest[2:]
        return "python", rest
    if name == "accelerate":
        return "accelerate", rest[1:] if rest[:1] == ["launch"] else rest
    if name == "lmf":
        name = "llamafactory-cli"
    # Other tools' own commands (`swift rlhf`) start one process unless told otherwise, like plain python.
    return (name if name in LAUNCHERS else "python"), rest


def _launcher(word: str) -> bool:
    name = Path(word).name
    return name in LAUNCHERS or bool(re.fullmatch(r"python[0-9.]*", name))


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options before the script: `--key value`, `--key=value`; dashes and underscores are the same."""
    options: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        key, separator, value = words[position].lstrip("-").partition("=")
        key = key.replace("-", "_")
        following = words[position + 1] if position + 1 < len(words) else ""
        if not separator and following and not following.startswith("-") and not following.endswith(".py"):
            value, position = following, position + 1
        options[key] = value
        position += 1
    return options


def _assignment(word: str) -> tuple[str, str] | None:
    match = re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", word, re.S)
    return (match[1], match[2]) if match else None


def _yaml(path: Path) -> dict:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(Problem(str(path), "--config_file", f"can't be read: {error}", "")) from None
    return document if isinstance(document, dict) else {}


def _int(text: object) -> int | None:
    text = str(text) if text is not None else ""
    return int(text) if re.fullmatch(r"\d+", text) else None
