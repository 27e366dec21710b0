"""Real LLaMA-Factory runs of tiny models, in fp32 on the CPU, and everything two such runs are compared by."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import shutil
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpofit.recipe.long_context import PIECES
from dpofit.train import hooks, longdpo
from dpofit.train.hooks import Hook

OWNER = "longdpo-test"
ASSETS = Path(__file__).parents[2] / "tools" / "dpofit" / "launch" / "smoke_assets"
CHUNK_POSITIONS = 5  # of the product's 512: answers here have tens of tokens, which shall take several chunks
TILE_TOKENS = 32  # of its 4,096, so that a batch is several tiles
SAME = 1e-5  # relative; fp32 sums in another order
DATASETS = {"dpo": "smoke_pairs", "kto": "smoke_labelled", "sft": "smoke_answers"}
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {"pref_loss": "hinge"},
    "ipo": {"pref_loss": "ipo"},
    "kto_pair": {"pref_loss": "kto_pair"},
    "orpo": {"pref_loss": "orpo"},
    "simpo": {"pref_loss": "simpo"},
    "ftx": {"pref_ftx": 0.5},
    "ld_alpha": {"ld_alpha": 0.4},
    "bco": {"pref_bco_weight": 0.7},
    "smoothed": {"dpo_label_smoothing": 0.2},
}


@dataclass(frozen=True)
class Case:
    """One run. `head`: own (untied), tied, or trained (LoRA with the head in modules_to_save)."""

    family: str = "qwen2"
    tuning: str = "full"  # full, lora
    head: str = "own"
    stage: str = "dpo"
    loss: str = "sigmoid"
    batch: int = 1
    accumulation: int = 1
    dtype: str = "fp32"  # bf16: fp32 weights under autocast; pure_bf16: bf16 weights, as under ZeRO-3
    steps: int = 20
    extra: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        named = [self.family, self.tuning, self.head, self.stage, self.loss, f"batch{self.batch}"]
        return "-".join([*named, f"accumulate{self.accumulation}", self.dtype])


def together(case: Case) -> tuple[str, ...]:
    """All the pieces that `case` can have at once."""
    left_out = {"shared_prompt"} if case.batch > 1 or case.stage != "dpo" else set()
    if case.stage == "sft" or case.loss in ("orpo", "simpo"):  # no reference
        left_out.add("cached_reference")
    return tuple(piece for piece in PIECES if piece not in left_out)


@dataclass
class Seen:
    """What one run did, in order."""

    losses: list[float] = field(default_factory=list)  # of every micro-step
    logps: list[list[float]] = field(default_factory=list)  # the policy's of every forward: chosen, rejected, …
    gradients: list[dict[str, Any]] = field(default_factory=list)  # of every optimizer step, by parameter
    metrics: list[dict[str, float]] = field(default_factory=list)
    reference_logps: list[list[float]] = field(default_factory=list)  # of every loss
    asks_reference: bool = False  # the forward under way is the reference's
    forwards: int = 0  # of any model, to score pairs
    models: int = 0  # built


def shape(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": case.head == "tied",
    }  # fmt: skip


def make_model(case: Case, folder: Path) -> Path:
    """A model of random weights that bf16 holds exactly, so that every dtype starts from the same numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    base = folder / f"{case.family}-{case.head == 'tied'}-{case.dtype == 'pure_bf16'}"
    if not base.exists():
        torch.manual_seed(1)
        more = {"sliding_window": None} if case.family == "mistral" else {}
        config = AutoConfig.for_model(case.family, **shape(case), **more)
        config.initializer_range = 0.1
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16()
        (model if case.dtype == "pure_bf16" else model.float()).save_pretrained(base)
        AutoTokenizer.from_pretrained(ASSETS / "tokenizer").save_pretrained(base)
    return base


def settings(case: Case, folder: Path) -> dict[str, Any]:
    lora: dict[str, Any] = {}
    if case.tuning == "lora":
        lora = {"lora_rank": 4, "lora_alpha": 32, "lora_target": "all"}
        if case.head == "trained":
            lora["additional_target"] = "lm_head"
    return {
        "model_name_or_path": str(make_model(case, folder)), "dataset_dir": str(ASSETS),
        "dataset": DATASETS[case.stage], "stage": case.stage, "finetuning_type": case.tuning,
        "template": "empty", "cutoff_len": 64, "do_train": True, "output_dir": str(folder / "out"),
        "overwrite_output_dir": True, "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": case.accumulation, "max_steps": case.steps, "learning_rate": 1e-3,
        "max_grad_norm": 1e6,  # DeepSpeed clips later than the gradients are looked at
        # With the usual 1e-8 Adam gives elements whose gradient is nothing but rounding a full step each: from weights
        # that differ in the last bit stock's own gradients are 2e-4 apart after 20 steps; with 1e-5 still 1e-5 to 5e-5
        # with LoRA and a tied head, with this 1e-6 to 2e-6. Elements that count are 1e-2 and more.
        "adam_epsilon": 1e-3,
        "save_strategy": "no", "report_to": "none", "logging_steps": 1, "dataloader_num_workers": 0,
        "preprocessing_num_workers": 1, "disable_tqdm": True,
        "bf16": case.dtype == "bf16", "pure_bf16": case.dtype == "pure_bf16",
        **lora, **LOSSES[case.loss], **dict(case.extra),
    }  # fmt: skip


def run(case: Case, pieces: Collection[str], folder: Path, **more: Any) -> Seen:
    """Train `case` with `pieces` in this process through LLaMA-Factory's own entry."""
    import llamafactory.extras.packages  # noqa: F401
    import torch
    from llamafactory.train.tuner import run_exp

    torch.set_num_threads(1)
    seen = Seen()
    from dpofit.train.longdpo import tiled_mlp

    chunk, longdpo.CHUNK_POSITIONS = longdpo.CHUNK_POSITIONS, CHUNK_POSITIONS
    tile, tiled_mlp.TILE_TOKENS = tiled_mlp.TILE_TOKENS, TILE_TOKENS
    longdpo.install(pieces)
    hooks.install(recording(seen, case))
    try:
        with quiet():
            run_exp({"use_cpu": True, **settings(case, folder), **more}, callbacks=[recorder(seen)])
    finally:
        hooks.uninstall(OWNER)
        longdpo.install(())
        longdpo.CHUNK_POSITIONS, tiled_mlp.TILE_TOKENS = chunk, tile
        shutil.rmtree(folder / "out", ignore_errors=True)
    return seen


def recording(seen: Seen, case: Case) -> list[Hook]:
    def training_step(stock: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            loss = stock(*args, **kwargs)
            seen.losses.append(loss.item())
            return loss

        return wrapped

    def concatenated_forward(stock: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            if not seen.asks_reference:
                names = ("chosen_logps", "rejected_logps", "chosen_logps_avg")
                kto = isinstance(output, tuple)  # chosen, rejected, logits of both, the mismatched pairs'
                parts = (output[0], output[1], output[4]) if kto else [output[name] for name in names]
                seen.logps.append([value for part in parts for value in part.tolist()])
            return output

        return wrapped

    def counting(name: str) -> Any:
        def wrap(stock: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                setattr(seen, name, getattr(seen, name) + 1)
                return stock(*args, **kwargs)

            return counted

        return wrap

    def compute_reference_log_probs(stock: Any) -> Any:
        def wrapped(trainer: Any, *args: Any) -> Any:
            seen.asks_reference = True
            try:
                result = stock(trainer, *args)
            finally:
                seen.asks_reference = False
            if not getattr(getattr(trainer, "_dpofit_reference", None), "scoring", False):
                seen.reference_logps.append([value for part in result if part is not None for value in part.tolist()])
            return result

        return wrapped

    trainers = [f"llamafactory.train.{stage}.trainer:Custom{stage.upper()}Trainer" for stage in ("dpo", "kto")]
    return [
        Hook(OWNER, "transformers.trainer:Trainer.training_step", training_step, order=100),
        *(Hook(OWNER, f"{trainer}.concatenated_forward", concatenated_forward, order=100) for trainer in trainers),
        Hook(OWNER, "llamafactory.model.loader:init_adapter", counting("models"), order=1000),
        *(Hook(OWNER, f"{trainer}.concatenated_forward", counting("forwards"), order=1000) for trainer in trainers),
        *(
            Hook(OWNER, f"{trainer}.compute_reference_log_probs", compute_reference_log_probs, order=1000)
            for trainer in trainers
        ),
        # LLaMA-Factory takes bf16 for a model that names no dtype wherever the CPU can compute it (extras/misc.py 227).
        *(
            [Hook(OWNER, "llamafactory.model.patcher:infer_optim_dtype", lambda stock: lambda **_: float32())]
            if case.dtype == "fp32"
            else []
        ),
        *(
            Hook(OWNER, f"{module}:is_torch_bf16_gpu_available", lambda stock: lambda: True)
            for module in ("transformers.training_args", "transformers.utils", "llamafactory.hparams.parser")
        ),
    ]


def float32() -> Any:
    import torch

    return torch.float32


def recorder(seen: Seen) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen.gradients.append(
                {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
            )

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            timed = ("runtime", "per_second", "flos", "epoch")
            seen.metrics.append(
                {name: float(value) for name, value in logs.items() if not any(part in name for part in timed)}
            )

    return Recorder()


@dataclass(frozen=True)
class Errors:
    """How far a run is from stock's, relative, at worst; inf where the two did not do the same things."""

    loss: float  # of a micro-step
    logps: float  # of one of the policy's sequences
    reference: float  # of one of the reference's
    gradients: float  # of a parameter in a step: norm of the difference by the norm of the step's whole gradient

    @property
    def worst(self) -> float:
        return max(asdict(self).values())


def errors(stock: Seen, long: Seen) -> Errors:
    return Errors(
        _relative([stock.losses], [long.losses]),
        _relative(stock.logps, long.logps),
        _relative(stock.reference_logps, long.reference_logps),
        _gradient_error(stock, long),
    )


def _relative(stock: list[list[float]], long: list[list[float]]) -> float:
    if [len(one) for one in stock] != [len(other) for other in long]:
        return float("inf")
    pairs = zip(itertools.chain(*stock), itertools.chain(*long), strict=True)
    return max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)


def _gradient_error(stock: Seen, long: Seen) -> float:
    import torch

    if len(stock.gradients) != len(long.gradients) or not stock.gradients:
        return float("inf")
    worst = 0.0
    for one, other in zip(stock.gradients, long.gradients, strict=True):
        if one.keys() != other.keys():
            return float("inf")
        whole = torch.stack([gradient.norm() for gradient in one.values()]).norm()
        worst = max(worst, *(float((one[name] - other[name]).norm() / whole) for name in one))
    return worst


def bf16_errors(exact: Seen, rounded: Seen) -> tuple[list[float], list[float]]:
    """How far each forward's log-probs and each step's gradients of a bf16 run are from the fp32 run's: norms of the
    differences."""
    logps = [
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for one, other in zip(
            [*exact.logps, *exact.reference_logps], [*rounded.logps, *rounded.reference_logps], strict=True
        )
    ]
    gradients = [
        sum(float((one[name] - other[name].float()).square().sum()) for name in one) ** 0.5
        for one, other in zip(exact.gradients, rounded.gradients, strict=True)
    ]
    return logps, gradients


def times_further(stock: Sequence[float], long: Sequence[float]) -> tuple[float, float]:
    """How many times further from the truth `long` is than `stock`, pair by pair: the 95 % interval of the geometric
    mean. Rounding is chance: one pair says nothing, and a piece is further off when the whole interval is above 1."""
    ratios = [math.log(b / a) for a, b in zip(stock, long, strict=True) if a and b]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    return math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what LLaMA-Factory and transformers tell of a run; an exception still carries its own text."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(previous)
