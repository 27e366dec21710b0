"""What the long-context pieces cost and save: FLOPs at the shape of Qwen2.5-72B, wall-clock of a small model here.

    python benchmarks/longdpo.py            # counts, times, writes benchmarks/results/longdpo.json

Needs the training stack (requirements.txt), no GPU. FLOPs are counted by torch.utils.flop_counter while LLaMA-Factory's
own code runs on fake tensors of the true widths; it counts attention as if nothing were masked, so halve that part for
a kernel that skips what is masked. Absolute times belong to the machine; the ratios are the point.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "longdpo.json"
PACKAGES = ("torch", "llamafactory", "transformers", "trl")
LOGPS, PROMPT = "answer_logps", "shared_prompt"
# Qwen2.5-72B's config.json.
QWEN_72B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
LAYERS_72B = 80
SMALL = {
    "model_type": "qwen2", "vocab_size": 16000, "hidden_size": 256, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL_LAYERS = 4


@dataclass(frozen=True)
class Pair:
    """Tokens of one pair; both answers are of one length."""

    prompt: int
    answer: int

    @property
    def row(self) -> int:
        return self.prompt + self.answer


PAIRS_72B = (Pair(8192, 1024), Pair(16384, 64), Pair(32768, 1024), Pair(65536, 1024))
PAIRS_SMALL = (Pair(1024, 128), Pair(2048, 64))


def make_model(config: dict[str, Any], layers: int, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {key: value for key, value in config.items() if key != "model_type"}
    shape = AutoConfig.for_model(config["model_type"], **changes, num_hidden_layers=layers, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    # As LLaMA-Factory: reentrant (model/model_utils/checkpointing.py 150).
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model.train()


def make_batch(pair: Pair, vocabulary: int) -> dict[str, Any]:
    """What LLaMA-Factory's collator gives for one pair that begins alike up to the answers."""
    import torch

    ids = torch.randint(3, vocabulary, (1, pair.row)).repeat(2, 1)
    ids[1, pair.prompt :] = ids[1, pair.prompt :] % (vocabulary - 4) + 4  # every answer token differs
    labels = ids.clone()
    labels[:, : pair.prompt] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def forward(model: Any, batch: dict[str, Any], is_reference: bool) -> Any:
    """CustomDPOTrainer's forward of both rows, stock or as the pieces have it. Returns what a loss is made of."""
    import torch
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    trainer = SimpleNamespace(finetuning_args=SimpleNamespace(use_ref_model=True), loss_type="sigmoid", ld_alpha=None)
    with torch.no_grad() if is_reference else contextlib.nullcontext():
        output = CustomDPOTrainer.concatenated_forward(trainer, model, batch, is_reference)
    return (output["chosen_logps"] - output["rejected_logps"]).sum()


@contextlib.contextmanager
def pieces(names: Sequence[str], pair: Pair | None = None) -> Iterator[None]:
    """The pieces installed; for fake tensors, whose values nobody can read, `pair` tells them where answers are."""
    import torch

    from dpofit.train import longdpo
    from dpofit.train.longdpo import answer_logps, shared_prompt
    from dpofit.train.longdpo.shared_row import SharedRow

    with contextlib.ExitStack() as stack:
        if pair is not None:
            zeros = torch.zeros(2 * pair.answer, dtype=torch.long)
            row = SharedRow(pair.prompt, pair.answer, pair.answer, pair.row)
            stack.enter_context(mock.patch.object(answer_logps, "answer_positions", lambda labels: (zeros, zeros)))
            stack.enter_context(mock.patch.object(shared_prompt, "shared_row", lambda ids, mask: row))
        longdpo.install(names)
        stack.callback(longdpo.install, ())
        yield


def count_flops(pair: Pair, names: Sequence[str], layers: int) -> dict[str, int]:
    """FLOPs of one forward without gradient, and of one forward with its backward, at the widths of 72B."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    # The counter knows the CUDA operators; the CPU's take the same arguments in the same order.
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    counts = {}
    with FakeTensorMode(), pieces(names, pair):
        model = make_model(QWEN_72B, layers, torch.bfloat16)
        for what, is_reference in (("forward", True), ("training", False)):
            counter = FlopCounterMode(display=False, custom_mapping=attention)
            with counter:
                loss = forward(model, make_batch(pair, QWEN_72B["vocab_size"]), is_reference)
                if not is_reference:
                    loss.backward()
            counts[what] = counter.get_total_flops()
    return counts


def flops_72b(pair: Pair, names: Sequence[str]) -> dict[str, float]:
    """`rest + layers x layer`, from models of one and two layers; in PFLOP (1e15)."""
    one, two = (count_flops(pair, names, layers) for layers in (1, 2))
    return {what: (one[what] + (LAYERS_72B - 1) * (two[what] - one[what])) / 1e15 for what in one}


def seconds(pair: Pair, names: Sequence[str], rounds: int) -> dict[str, float]:
    """Median seconds of the same two on real tensors, fp32."""
    import torch

    torch.manual_seed(0)
    model = make_model(SMALL, SMALL_LAYERS, torch.float32)
    batch = make_batch(pair, SMALL["vocab_size"])
    taken: dict[str, list[float]] = {"forward": [], "training": []}
    with pieces(names):
        for _ in range(rounds + 1):
            for what, is_reference in (("forward", True), ("training", False)):
                start = time.perf_counter()
                loss = forward(model, batch, is_reference)
                if not is_reference:
                    loss.backward()
                    model.zero_grad()
                taken[what].append(time.perf_counter() - start)
    return {what: statistics.median(values[1:]) for what, values in taken.items()}  # the first round warms up


def ratios(stock: dict[str, float], long: dict[str, float]) -> dict[str, float]:
    """Stock by long, a pair: stock asks its reference at every epoch; with cached_reference that is one forward, with
    the same pieces, for all epochs."""
    every = stock["training"] + stock["forward"]
    return {
        "cached_reference_1_epoch": every / (long["training"] + long["forward"]),
        "cached_reference_3_epochs": every / (long["training"] + long["forward"] / 3),
        "cached_reference_filled": every / long["training"],
    }


def table(title: str, unit: str, pairs: Sequence[Pair], measure: Any) -> list[dict[str, Any]]:
    print(f"{title}\n{'pair':>12}  {'pieces':<28}{'forward':>11}{'training':>11}  stock by it, reference cached for"
          f"\n{'':>12}  {'':<28}{unit:>11}{unit:>11}  1 epoch  3 epochs  many")  # fmt: skip
    rows = []
    for pair in pairs:
        stock = None
        for names in ((), (LOGPS,), (PROMPT,), (LOGPS, PROMPT)):
            cost = measure(pair, names)
            stock = stock or cost
            by = ratios(stock, cost)
            once, thrice, many = by.values()
            rows.append({"pair": asdict(pair), "pieces": list(names), unit: cost, "stock_by_it": by})
            print(
                f"{f'{pair.prompt}+{pair.answer}':>12}  {'+'.join(names) or 'stock':<28}{cost['forward']:11.3f}"
                f"{cost['training']:11.3f}  {once:7.2f}  {thrice:8.2f}  {many:4.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import llamafactory.extras.packages  # noqa: F401  before trl
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")  # a reference's forward
    flops = table("Qwen2.5-72B, FLOPs", "PFLOP", PAIRS_72B, flops_72b)
    timed = table("Small model, this CPU, one thread", "seconds", PAIRS_SMALL,
                  lambda pair, names: seconds(pair, names, arguments.rounds))  # fmt: skip
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": 1},
        "flops": {
            "model": {**QWEN_72B, "num_hidden_layers": LAYERS_72B},
            "counted": "torch.utils.flop_counter on fake tensors; whole = one layer + 79 x (two layers - one layer)",
            "training": "forward, its recomputation (reentrant checkpointing), backward",
            "rows": flops,
        },
        "seconds": {"model": {**SMALL, "num_hidden_layers": SMALL_LAYERS, "dtype": "float32"}, "rows": timed},
    }
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tools"))
    main()
