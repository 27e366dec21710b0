"""The half of a smoke run that happens inside the job: random weights, what was trained, whether it can be loaded."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

PLAN_FILE, WEIGHTS = "smoke.json", "model.safetensors"
# DeepSpeed's CPU Adam multiplies beta^t up step by step, but computes pow(beta, t) after a resume (0.18.4
# csrc/includes/cpu_adam.h:57 IncrementStep). The two round differently in fp32, which 1 - 0.999^t magnifies: at step 3
# the update came out 1.0e-5 smaller, computed and measured. So masters differ by a 1e-4th of an update at most, and
# bf16 weights by the rounding that this can tip.
CPU_ADAM_REL_UPDATE = 1e-4


def prepare(folder: Path) -> None:
    """Before the run: the tiny model's weights, made once by local rank 0."""
    plan = json.loads((folder / PLAN_FILE).read_text())
    model = folder / "model"
    if os.environ.get("LOCAL_RANK", "0") == "0" and not (model / WEIGHTS).exists():
        _make_weights(model, float(plan["head_scale"]))
    deadline = time.monotonic() + 300
    while not (model / WEIGHTS).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{model / WEIGHTS} did not appear within 300 s")
        time.sleep(0.1)


def result_file(folder: Path, run: str) -> Path:
    """Where a run (`train`, `resume`) leaves what it saw."""
    return folder / f"result.{run}.json"


class SmokeCallback(TrainerCallback):
    """Keeps every logged loss, and the trained parameters as they are in memory when training ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = json.loads((folder / PLAN_FILE).read_text())["run"]
        self._losses: list[float] = []
        self._initial: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The weights before the first step, or those resumed from; all ranks take part."""
        self._initial = _whole_parameters(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Losses in order."""
        if logs and "loss" in logs:
            self._losses.append(float(logs["loss"]))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """All ranks take part: under ZeRO-3 each parameter is gathered in turn."""
        from safetensors.torch import save_file

        trained = _whole_parameters(model)
        if state.is_world_process_zero:
            save_file(trained, self._folder / f"trained.{self._run}.safetensors")
            moved = sum(not bool((trained[name] == before).all()) for name, before in self._initial.items())
            while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
                optimizer = optimizer.optimizer
            result = {
                "losses": self._losses, "step": state.global_step, "device": str(args.device), "moved": moved,
                "optimizer": type(optimizer).__name__,
            }  # fmt: skip
            result_file(self._folder, self._run).write_text(json.dumps(result))


def finish(settings: dict[str, Any], folder: Path) -> None:
    """After the run: rank 0 loads what was saved with plain transformers and compares it to what was trained."""
    plan = json.loads((folder / PLAN_FILE).read_text())
    if os.environ.get("RANK", "0") != "0":
        return
    path = result_file(folder, plan["run"])
    result = json.loads(path.read_text())
    result["loaded"], result["different"] = _compare(settings, folder, plan["run"])
    if plan["run"] == "resume":
        result["apart"] = apart(
            folder / "trained.train.safetensors",
            folder / "trained.resume.safetensors",
            float(settings["learning_rate"]) * CPU_ADAM_REL_UPDATE,
        )
    path.write_text(json.dumps(result))


def apart(one: Path, other: Path, slack: float) -> dict[str, int]:
    """How far two sets of weights are apart: of `values`, how many `differ`, and how many of those lie `beyond` one
    rounding unit of their dtype plus `slack` (in the weights' own unit)."""
    import torch
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    if first.keys() != second.keys():
        raise ValueError(f"{one} and {other} hold different tensors")
    values = differ = beyond = 0
    for name, a in first.items():
        x, y = a.double(), second[name].double()
        # In [2^(e-1), 2^e) numbers are eps * 2^(e-1) apart; frexp gives that e.
        exponent = torch.frexp(torch.maximum(x.abs(), y.abs())).exponent
        spacing = torch.exp2(exponent.double() - 1) * torch.finfo(a.dtype).eps
        values += x.numel()
        differ += int((x != y).sum())
        beyond += int((~((x - y).abs() <= spacing + slack)).sum())
    return {"values": values, "differ": differ, "beyond": beyond}


def _make_weights(model: Path, head_scale: float) -> None:
    """Random weights from config.json, in the dtype the config names, seeded. A scaled head makes every token's
    probability nearly 1/vocabulary, which fixes the first loss of methods without a reference model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tiny = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    if head_scale != 1.0:
        with torch.no_grad():
            tiny.get_output_embeddings().weight.mul_(head_scale)
    staging = model.with_name("weights")
    tiny.save_pretrained(staging)
    (staging / WEIGHTS).rename(model / WEIGHTS)  # in one step: the other ranks wait for it


def _whole_parameters(model: Any) -> dict[str, Any]:
    import torch

    def copy(parameter: Any) -> Any:
        return parameter.detach().to("cpu", copy=True).contiguous()

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not any(hasattr(parameter, "ds_id") for _, parameter in named):
        return {name: copy(parameter) for name, parameter in named}
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    whole = {}
    for name, parameter in named:
        with GatheredParameters([parameter]), torch.no_grad():
            whole[name] = copy(parameter)
    return whole


def _compare(settings: dict[str, Any], folder: Path, run: str) -> tuple[int, list[str]]:
    """How many trained tensors the saved model has bit for bit, and the names of those it has not."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else from_pretrained would shard what it loads
    saved = Path(settings["output_dir"])
    adapter = (saved / "adapter_config.json").exists()
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model" if adapter else saved, dtype="auto")
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, saved, is_trainable=True)
    parameters = dict(model.named_parameters())
    same, different = 0, []
    for name, trained in load_file(folder / f"trained.{run}.safetensors").items():
        name = name.removeprefix("pretrained_model.")
        if name.startswith("v_head."):
            continue  # a reward model's head is in a file of its own
        loaded = parameters.get(name)
        if loaded is not None and torch.equal(loaded.detach(), trained.to(loaded.dtype)):
            same += 1
        else:
            different.append(name)
    return same, different
