"""The closed form against the trace, phase by phase, on a grid of jobs: `python benchmarks/agreement.py [--quick]`.

Both routes give allocated bytes; they share only the event format. Prints each point and a summary; the whole grid
writes benchmarks/results/agreement.json. Needs the training stack (requirements.txt), no GPU. Models have 4 layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from agreement_report import RESULTS, agreement_of, errors, sentence

from dpofit.hardware.cluster import Cluster
from dpofit.hardware.gpus import find_gpu
from dpofit.memory.job import Job, Lengths, Stack
from dpofit.memory.meter import Peak, phase_peaks
from dpofit.memory.partition import fullest_ranks
from dpofit.memory.predict import predict
from dpofit.models.known import find_model
from dpofit.recipe.recipe import Badam, Recipe, ZeroConfig

COMPARED = ("forward", "reference_forward", "loss", "backward", "accumulate", "optimizer_step")
TRACED_LAYERS = 4
UNSLOTH = (("use_unsloth", True), ("environment", {"UNSLOTH_BLOCK_COMPILE": "0"}))

ZERO = {
    "none": None,
    "z0": ZeroConfig("z0", 0),
    "z1": ZeroConfig("z1", 1),
    "z1_overlap": ZeroConfig("z1_overlap", 1, overlap_comm=True, reduce_bucket_size="auto"),
    "z2": ZeroConfig("z2", 2, overlap_comm=False),
    "z2_round_robin": ZeroConfig("z2_round_robin", 2, overlap_comm=False, round_robin_gradients=True),
    "z2_offload": ZeroConfig("z2_offload", 2, offload_optimizer="cpu", optimizer_pin_memory=True),
    "z3": ZeroConfig(
        "z3", 3, reduce_bucket_size="auto", prefetch_bucket_size="auto", param_persistence_threshold="auto"
    ),
    "z3_offload": ZeroConfig(
        "z3_offload", 3, offload_optimizer="cpu", offload_param="cpu", optimizer_pin_memory=True,
        param_pin_memory=True, reduce_bucket_size="auto", prefetch_bucket_size="auto",
        param_persistence_threshold="auto",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One job of the grid, by name."""

    model: str
    stage: str = "dpo"
    pref_loss: str = "sigmoid"
    finetuning: str = "full"
    zero: str = "none"
    pure_bf16: bool = False
    checkpointing: str = "reentrant"
    liger: bool = False
    attention: str = "sdpa"
    padded: bool = True
    pairs: int = 1
    tokens: int = 2048
    optim: str = "adamw_torch_fused"
    recipe: tuple[tuple[str, Any], ...] = ()  # further fields of the Recipe

    def job(self) -> Job:
        recipe = Recipe(
            name="grid", source=Path("grid.yaml"), settings={}, model=self.model, stage=self.stage,
            finetuning=self.finetuning, zero=ZERO[self.zero], micro_batch=self.pairs, cutoff_len=self.tokens,
            pref_loss=self.pref_loss, bf16=not self.pure_bf16, pure_bf16=self.pure_bf16,
            gradient_checkpointing=self.checkpointing != "none", use_unsloth_gc=self.checkpointing == "unsloth",
            liger=self.liger, flash_attn=self.attention, optim=self.optim, **dict(self.recipe),
        )  # fmt: skip
        shape = find_model(self.model)
        world = 1 if self.zero == "none" else 8
        cluster = Cluster(find_gpu("a100-80g"), nodes=1, gpus_per_node=world)
        lengths = Lengths(
            prompt=self.tokens // 2, chosen=self.tokens // 2, rejected=self.tokens // 2, padded=self.padded
        )
        layers = max(TRACED_LAYERS, shape.family.full_attention_every)  # at least one of each kind
        return Job(recipe, replace(shape, layers=layers), cluster, lengths, Stack())


def grid() -> Iterator[Point]:
    """Every choice against every other where it can matter."""
    yield from families()
    for model, finetuning in product(
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"), ("full", "lora")
    ):
        for checkpointing, liger in product(("reentrant", "unsloth", "none"), (False, True)):
            yield Point(model, finetuning=finetuning, pure_bf16=True, checkpointing=checkpointing, liger=liger)
        for attention, padded in (("sdpa", False), ("fa2", False), ("disabled", True)):
            yield Point(model, finetuning=finetuning, pure_bf16=True, attention=attention, padded=padded)
        for pref_loss in ("orpo", "simpo"):
            yield Point(model, finetuning=finetuning, pure_bf16=True, pref_loss=pref_loss)
        for liger in (False, True):
            yield Point(model, finetuning=finetuning, stage="sft", liger=liger, pure_bf16=True)
            yield Point(model, finetuning=finetuning, stage="sft", liger=liger)
            yield Point(model, finetuning=finetuning, liger=liger)
        for pairs, tokens in ((1, 512), (2, 1024), (4, 4096)):
            yield Point(model, finetuning=finetuning, pure_bf16=True, pairs=pairs, tokens=tokens, padded=False)
        for zero in ("z2", "z2_offload", "z3", "z3_offload"):
            for liger in (False, True):
                yield Point(model, finetuning=finetuning, zero=zero, liger=liger)
        for stage, zero in product(("dpo", "rm"), ("z1_overlap", "z2_round_robin")):
            yield Point(model, stage=stage, finetuning=finetuning, zero=zero)
        yield Point(model, finetuning=finetuning, pure_bf16=True, optim="adamw_torch")
        for zero in ("none", "z0", "z1", "z2", "z2_offload", "z3", "z3_offload"):
            yield Point(model, finetuning=finetuning, zero=zero, recipe=(("gradient_accumulation", 2),))
        for liger in (False, True):
            yield Point(model, stage="sft", finetuning=finetuning, zero="z3", liger=liger)
        yield from knobs(model, finetuning)


def families() -> Iterator[Point]:
    """One model of each family that computes in a way of its own, or is only known by its shape."""
    for model in (
        "google/gemma-2-2b", "google/gemma-3-1b-it", "zai-org/glm-4-9b-chat-hf", "zai-org/GLM-4-9B-0414",
        "microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-4-mini-instruct", "01-ai/Yi-6B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ):  # fmt: skip
        for liger in (False, True):
            yield Point(model, tokens=1024, zero="z3", liger=liger)
            yield Point(model, tokens=1024, zero="z3", liger=liger, finetuning="lora")
            yield Point(model, tokens=1024, zero="z2", liger=liger)
            yield Point(model, tokens=1024, finetuning="lora", liger=liger)
            yield Point(model, tokens=1024, finetuning="lora", liger=liger, stage="sft", checkpointing="none")
            yield Point(model, tokens=1024, stage="sft", pure_bf16=True, liger=liger)
        yield Point(model, tokens=1024, finetuning="lora", stage="sft", pure_bf16=True, attention="disabled")
        yield Point(model, tokens=1024, finetuning="lora", stage="sft", attention="fa2")
    for model in ("google/gemma-3-1b-it", "mistralai/Mistral-7B-v0.1"):  # rows longer than the window, none padded
        yield Point(model, tokens=4608, finetuning="lora", stage="sft", pure_bf16=True, padded=False)
    phi3 = "microsoft/Phi-3-mini-4k-instruct"
    for layers, modules, extra in ((2, ("all",), ()), (-1, ("all",), ()), (2, ("mlp",), ("norm",))):
        freeze = (("freeze_layers", layers), ("freeze_modules", modules), ("freeze_extra", extra))
        yield Point(phi3, tokens=1024, finetuning="freeze", zero="z3", recipe=freeze)
    eager = {"stage": "sft", "tokens": 1024, "attention": "disabled", "recipe": (("neat_packing", True),)}
    yield Point("Qwen/Qwen2.5-0.5B", zero="z3", **eager)
    dora = {"finetuning": "lora", "stage": "sft", "zero": "z3", "recipe": (("use_dora", True),)}
    yield Point("meta-llama/Llama-3.1-8B", **dora)


def knobs(model: str, finetuning: str) -> Iterator[Point]:
    """Stages beside the ones above, and keys that say what is trained."""
    for stage, zero, pairs in product(("kto", "rm"), ("none", "z2", "z3"), (1, 2)):
        yield Point(model, stage=stage, finetuning=finetuning, zero=zero, pairs=pairs)
        yield Point(model, stage=stage, finetuning=finetuning, zero=zero, pairs=pairs, checkpointing="none", liger=True)
    for zero in ("none", "z2", "z3"):
        for stage, key in product(("dpo", "sft"), ("upcast_layernorm", "upcast_lmhead_output")):
            if not (key == "upcast_layernorm" and "Qwen3" in model):
                yield Point(model, stage=stage, finetuning=finetuning, zero=zero, recipe=((key, True),))
        if finetuning == "lora" and zero != "z3":
            for names in (("embed_tokens",), ("embed_tokens", "lm_head"), ("norm",)):
                yield Point(model, finetuning=finetuning, zero=zero, recipe=(("additional_target", names),))
        if finetuning == "lora":
            yield Point(model, finetuning=finetuning, zero=zero, recipe=(("ref_model", "another"),))
            yield Point(model, finetuning=finetuning, zero=zero, recipe=(("use_dora", True),))
    if finetuning == "lora" and "Qwen3" not in model:  # whose layers unsloth has code of its own for
        for pref_loss, more in (("sigmoid", ()), ("orpo", ()), ("sigmoid", (("gradient_accumulation", 2),))):
            yield Point(model, finetuning=finetuning, pref_loss=pref_loss, recipe=(*UNSLOTH, *more))
        yield Point(model, finetuning=finetuning, pairs=2, tokens=1032, recipe=UNSLOTH)
    for bits in (4, 8):
        quantized = (("ref_model", "another"), ("ref_model_quantization_bit", bits))
        yield Point(model, finetuning=finetuning, recipe=quantized)
    yield Point(model, finetuning=finetuning, recipe=(("use_muon", True),))
    for attention in ("sdpa", "fa2", "disabled"):
        yield Point(model, finetuning=finetuning, stage="sft", attention=attention, recipe=(("neat_packing", True),))
    if finetuning == "full":
        for stage, switch_mode, start_block in (
            ("dpo", "ascending", None), ("sft", "descending", None), ("sft", "fixed", 2), ("rm", "random", None),
        ):  # fmt: skip
            badam = (("badam", Badam("layer", switch_mode, start_block)),)
            yield Point(model, stage=stage, recipe=badam)
            yield Point(model, stage=stage, pure_bf16=True, checkpointing="none", liger=True, recipe=badam)
        for optim, more in (("adamw_torch", ()), ("adamw_torch_fused", (("gradient_accumulation", 2),))):
            badam = (("badam", Badam("layer", "ascending")), *more)
            yield Point(model, stage="sft", checkpointing="unsloth", optim=optim, recipe=badam)
        for layers, modules, extra in (
            (2, ("all",), ()), (-1, ("all",), ()), (2, ("mlp",), ("norm",)), (1, ("all",), ("embed_tokens",)),
        ):  # fmt: skip
            freeze = (("freeze_layers", layers), ("freeze_modules", modules), ("freeze_extra", extra))
            for zero, checkpointing in (
                ("none", "reentrant"),
                ("none", "none"),
                ("z2", "reentrant"),
                ("z3", "unsloth"),
            ):
                yield Point(model, finetuning="freeze", zero=zero, checkpointing=checkpointing, recipe=freeze)


def fields_of(point: Point) -> dict[str, Any]:
    """The point as JSON has it."""
    return {field: getattr(point, field) for field in Point.__dataclass_fields__}


def compare(point: Point) -> dict[str, Any]:
    """Steady-state peaks of one point by both routes."""
    from dpofit.trace.job import trace_job

    job = point.job()
    start = time.perf_counter()
    predicted = {name: peak.size_bytes for name, peak in predict(job).gpu.phases.items() if name in COMPARED}
    middle = time.perf_counter()
    traced: dict[str, int] = {}
    for rank in fullest_ranks(job):  # the closed form is of the rank that needs most, at each moment
        peaks = phase_peaks(trace_job(job, rank), frozenset({"gpu"}))
        for phase, size_bytes in _steady(peaks, apart="accumulate" in predicted).items():
            traced[phase] = max(size_bytes, traced.get(phase, 0))
    return {
        "point": fields_of(point),
        "predicted_bytes": predicted,
        "traced_bytes": traced,
        "commit": _commit(),
        "seconds": [round(middle - start, 3), round(time.perf_counter() - middle, 3)],
    }


@cache
def _commit() -> str:
    """The code's, so that a file with rows of several runs says so."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _steady(peaks: list[Peak], apart: bool) -> dict[str, int]:
    """The highest of each phase of step 2. `apart`: its later micro-batches are all "accumulate", as the closed form
    has them where it shows the first; else it shows a later one."""
    found: dict[str, int] = {}
    micro_batch = 0
    for peak in peaks:
        if peak.step == 2 and peak.phase in COMPARED:
            micro_batch += peak.phase == "forward"
            later = apart and micro_batch > 1 and peak.phase != "optimizer_step"
            phase = "accumulate" if later else peak.phase
            found[phase] = max(peak.size_bytes, found.get(phase, 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every 12th point")
    parser.add_argument("--resume", action="store_true", help="keep the points that the results file has already")
    parser.add_argument("--beyond", action="store_true", help="again what is beyond a bound; keep the other points")
    parser.add_argument("--only", help="a Python expression over p (a Point), e.g. \"p.zero == 'z3'\"")
    options = parser.parse_args()
    points = {_key(fields_of(point)): point for point in list(grid())[:: 12 if options.quick else 1]}
    if options.only:
        points = {key: point for key, point in points.items() if eval(options.only, {"p": point})}
    rows: dict[str, dict[str, Any]] = {}
    if (options.resume or options.beyond) and RESULTS.exists():
        rows = {_key(row["point"]): row for row in json.loads(RESULTS.read_text())}
    todo = {key: point for key, point in points.items() if key not in rows}
    if options.beyond:
        todo = {key: point for key, point in points.items() if key in rows and not agreement_of(rows[key]).agrees}
    kept = options.resume or options.beyond or not (options.only or options.quick)
    for number, (key, point) in enumerate(todo.items(), 1):
        try:
            row = compare(point)
        except Exception as problem:  # one point must not cost the others; it's reported
            print(f"{point}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            continue
        rows[key] = row
        of_peak, worst, of_worst, same = errors(row)
        print(
            f"{number}/{len(todo)} {of_peak:+.2%} {worst} {of_worst:+.2%} {'' if same else 'OTHER PHASE'} {point}",
            flush=True,
        )
        if kept:
            RESULTS.write_text(_document(list(rows.values())))
    print(sentence([agreement_of(row) for row in rows.values()]))


def _key(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=asdict)


def _document(rows: list[dict[str, Any]]) -> str:
    """A row a line, so that a changed point is a changed line."""
    return "[\n" + ",\n".join(json.dumps(row, default=asdict) for row in rows) + "\n]\n"


if __name__ == "__main__":
    main()
