"""What is refused here is what LLaMA-Factory's own parser refuses, and nothing else."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dpofit.recipe.load import read_recipe
from dpofit.recipe.rules import RULES

pytestmark = pytest.mark.stack

DEEPSPEED = Path(__file__).resolve().parents[2] / "deepspeed"
BASE = {
    "model_name_or_path": "x",
    "stage": "dpo",
    "do_train": True,
    "dataset": "a",
    "finetuning_type": "full",
    "output_dir": "saves/none",
}
Z3 = {"deepspeed": str(DEEPSPEED / "z3.json")}
LORA = {"finetuning_type": "lora"}
SFT = {"stage": "sft"}
PPO = {"stage": "ppo", "reward_model": "r", "reward_model_type": "full"}
STEPS = {"eval_strategy": "steps", "val_size": 0.1}
# (id, key) of a rule → the least that breaks it
BREAKS = {
    ("config.no-model", "model_name_or_path"): {"model_name_or_path": None},
    ("config.pixels", "image_max_pixels"): {"image_max_pixels": 10},
    ("config.pixels", "video_max_pixels"): {"video_max_pixels": 10},
    ("config.export-dataset", "export_quantization_bit"): {"export_quantization_bit": 4},
    ("config.eval-data-twice", "val_size"): {"val_size": 0.1, "eval_dataset": "e"},
    ("config.mixing", "interleave_probs"): {"interleave_probs": "0.5,0.5", "mix_strategy": "interleave_under"},
    ("config.streaming", "val_size"): {"streaming": True, "max_steps": 5, "val_size": 0.1},
    ("config.streaming", "max_samples"): {"streaming": True, "max_steps": 5, "max_samples": 5},
    ("config.streaming", "max_steps"): {"streaming": True},
    ("config.mask-history", "mask_history"): {**SFT, "mask_history": True, "train_on_prompt": True},
    ("config.reference-bits", "ref_model_quantization_bit"): {"ref_model_quantization_bit": 3},
    ("config.reference-bits", "reward_model_quantization_bit"): {"reward_model_quantization_bit": 3},
    ("config.reward-model", "reward_model"): {"stage": "ppo", "reward_model_type": "full"},
    ("config.reward-model", "reward_model_type"): {**PPO, "reward_model_type": "lora"},
    ("config.label-smoothing-loss", "dpo_label_smoothing"): {"pref_loss": "ipo", "dpo_label_smoothing": 0.1},
    ("config.llama-pro-full", "use_llama_pro"): {"use_llama_pro": True},
    ("config.block-optimizer", "finetuning_type"): {**LORA, "use_galore": True},
    ("config.block-optimizer", "use_galore"): {"use_galore": True, "use_apollo": True},
    ("config.block-optimizer", "deepspeed"): {**Z3, "use_galore": True},
    ("config.pissa-stage", "pissa_init"): {**LORA, "pissa_init": True},
    ("config.sft-only", "predict_with_generate"): {"predict_with_generate": True},
    ("config.sft-only", "neat_packing"): {"neat_packing": True},
    ("config.sft-only", "train_on_prompt"): {"train_on_prompt": True},
    ("config.sft-only", "mask_history"): {"mask_history": True},
    ("config.predict-with-generate", "do_predict"): {**SFT, "do_predict": True, "val_size": 0.1},
    ("config.predict-with-generate", "predict_with_generate"): {
        **SFT,
        **Z3,
        "val_size": 0.1,
        "predict_with_generate": True,
    },
    ("config.load-best", "load_best_model_at_end"): {
        **STEPS,
        "stage": "rm",
        "load_best_model_at_end": True,
        "eval_steps": 500,
    },
    ("config.ppo", "do_train"): {**PPO, "do_train": False},
    ("config.ppo", "shift_attn"): {**PPO, "shift_attn": True},
    ("config.no-dataset", "dataset"): {"dataset": None},
    ("config.no-eval-data", "eval_strategy"): {"eval_strategy": "epoch"},
    ("config.quantization-device-map", "quantization_device_map"): {"quantization_device_map": "auto"},
    ("config.pissa-zero3", "pissa_init"): {**SFT, **LORA, **Z3, "pissa_init": True},
    ("config.pure-bf16-zero3", "pure_bf16"): {**Z3, "pure_bf16": True},
    ("config.quantization-fp8", "fp8"): {**LORA, "fp8": True, "quantization_bit": 4},
    ("config.inference-backend", "infer_backend"): {"infer_backend": "vllm"},
    ("config.unsloth-zero3", "use_unsloth"): {**LORA, **Z3, "use_unsloth": True},
    ("config.kt-zero3", "use_kt"): {**LORA, **Z3, "use_kt": True},
    ("config.trackio-project", "project"): {"report_to": "trackio", "project": ""},
    ("config.adapter-method", "adapter_name_or_path"): {"adapter_name_or_path": "p"},
    ("config.quantization-method", "quantization_bit"): {"quantization_bit": 4},
    ("config.pissa-quantized", "pissa_init"): {**SFT, **LORA, "pissa_init": True, "quantization_bit": 4},
    ("config.quantization-vocab", "resize_vocab"): {**LORA, "resize_vocab": True, "quantization_bit": 4},
    ("config.quantization-adapter", "create_new_adapter"): {
        **LORA,
        "adapter_name_or_path": "p",
        "create_new_adapter": True,
        "quantization_bit": 4,
    },
    ("config.quantization-adapter", "adapter_name_or_path"): {
        **LORA,
        "adapter_name_or_path": "p,q",
        "quantization_bit": 4,
    },
    ("config.precision-twice", "fp16"): {"fp16": True, "bf16": True},
    ("config.precision-twice", "fp16_full_eval"): {"fp16_full_eval": True, "bf16_full_eval": True},
    ("config.scheduler-needs-eval", "lr_scheduler_type"): {"lr_scheduler_type": "reduce_lr_on_plateau"},
    ("config.steps", "logging_steps"): {"logging_steps": 1.5},
    ("config.steps", "eval_steps"): {**STEPS, "eval_steps": 1.5},
    ("config.steps", "save_steps"): {"save_steps": 1.5},
    ("config.steps", "torch_empty_cache_steps"): {"torch_empty_cache_steps": 0},
    ("config.steps", "warmup_steps"): {"warmup_steps": -1},
    ("config.prefetch-without-workers", "dataloader_prefetch_factor"): {"dataloader_prefetch_factor": 2},
    ("config.lora-only", "use_dora"): {"use_dora": True},
    ("config.lora-only", "use_rslora"): {"use_rslora": True},
    ("config.lora-only", "loraplus_lr_ratio"): {"loraplus_lr_ratio": 16.0},
    ("config.lora-only", "pissa_init"): {"pissa_init": True, "pref_loss": "orpo"},
}
# Refused after the parser: by the model's loading, or the trainer's start.
LATER = {
    ("config.quantization-bits", "quantization_bit"),
    ("config.quantization-zero3", "quantization_bit"),
    ("config.flash-attn-fa3", "flash_attn"),
    ("config.auto-batch-zero3", "auto_find_batch_size"),
}
POOL = {
    "stage": ["sft", "dpo", "rm", "ppo", "kto", "pt"],
    "finetuning_type": ["full", "lora", "freeze", "oft"],
    "deepspeed": [str(DEEPSPEED / "z3.json"), str(DEEPSPEED / "z2.json")],
    "dataset": ["a,b", ["a", "b"], None],
    "eval_dataset": ["e"],
    "val_size": [0.1, 5],
    "do_eval": [True],
    "eval_strategy": ["steps", "epoch"],
    "bf16": [True],
    "fp16": [True],
    "pure_bf16": [True],
    "quantization_bit": [4, 8],
    "pissa_init": [True],
    "use_dora": [True],
    "use_rslora": [True],
    "loraplus_lr_ratio": [16.0],
    "neat_packing": [True],
    "packing": [True],
    "train_on_prompt": [True],
    "mask_history": [True],
    "streaming": [True],
    "max_steps": [10],
    "max_samples": [5],
    "interleave_probs": ["0.5,0.5", "1"],
    "mix_strategy": ["interleave_under"],
    "pref_loss": ["orpo", "simpo", "ipo"],
    "dpo_label_smoothing": [0.1],
    "load_best_model_at_end": [True],
    "save_strategy": ["no", "epoch", "best"],
    "save_steps": [100, 0.5],
    "eval_steps": [50, 30, 0.25],
    "adapter_name_or_path": ["p", "p,q"],
    "create_new_adapter": [True],
    "resize_vocab": [True],
    "predict_with_generate": [True],
    "do_predict": [True],
    "compute_accuracy": [True],
    "reward_model": ["r"],
    "reward_model_type": ["full"],
    "do_train": [False],
    "lr_scheduler_type": ["cosine", "greedy"],
    "logging_steps": [10, 1.5],
    "dataloader_prefetch_factor": [2],
    "dataloader_num_workers": [2],
    "fp8": [True],
    "warmup_ratio": [0.1, -0.1],
    "torch_empty_cache_steps": [3],
    "use_unsloth_gc": [True],
    "save_only_model": [True],
    "gradient_checkpointing": [True],
    "flash_attn": ["fa2", "sdpa"],
    "optim": ["adamw_8bit", "paged_adamw_8bit"],
    "lora_target": ["q_proj,v_proj"],
    "cutoff_len": [4096],
}


def random_recipes(count: int) -> list[dict]:
    chance = random.Random(20260818)
    recipes = []
    for _ in range(count):
        keys = chance.sample(sorted(POOL), chance.randint(1, 5))
        recipes.append({**BASE, **{key: chance.choice(POOL[key]) for key in keys}})
    return recipes


RANDOM = random_recipes(60)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> list[dict]:
    """What LLaMA-Factory says of BASE, of every recipe in BREAKS, and of RANDOM; one process."""
    cases = [BASE, *({**BASE, **change} for change in BREAKS.values()), *RANDOM]
    script = Path(__file__).with_name("llamafactory_parser.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("work"),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture
def ours(tmp_path):
    def read(settings: dict):
        path = tmp_path / "r.yaml"
        path.write_text(yaml.safe_dump(settings))
        return read_recipe(str(path), (), {})

    return read


def test_every_rule_has_a_recipe_that_breaks_it():
    assert {(rule.id, rule.key) for rule in RULES} <= {*BREAKS, *LATER}


def test_the_base_recipe_is_accepted_by_both(theirs, ours):
    assert theirs[0]["error"] is None
    assert ours(BASE).issues == ()


@pytest.mark.parametrize("place", range(len(BREAKS)), ids=[f"{id}:{key}" for id, key in BREAKS])
def test_a_broken_rule_is_refused_by_both(place, theirs, ours):
    (id, key), change = list(BREAKS.items())[place]
    assert theirs[1 + place]["error"] is not None
    assert (id, key) in {(issue.id, issue.key) for issue in ours({**BASE, **change}).issues if issue.stops}


def test_random_combinations_are_refused_by_both_or_by_neither(theirs, ours):
    disagreements = []
    for settings, result in zip(RANDOM, theirs[1 + len(BREAKS) :], strict=True):
        stops = [issue.id for issue in ours(settings).issues if issue.stops]
        # trainer.py 836 refuses this pair later than the parser
        later = settings.get("save_only_model") and settings.get("load_best_model_at_end") and "deepspeed" in settings
        if bool(stops) != (result["error"] is not None) and not later:
            disagreements.append((settings, stops, result["error"]))
    assert disagreements == []


def test_accepted_recipes_have_the_values_llamafactory_parsed(theirs, ours):
    compared = 0
    for settings, result in zip([BASE, *RANDOM], [theirs[0], *theirs[1 + len(BREAKS) :]], strict=True):
        recipe = ours(settings).recipe
        if result["error"] is not None or recipe is None:
            continue
        compared += 1
        expected = {
            "stage": recipe.stage,
            "finetuning_type": recipe.finetuning,
            "bf16": recipe.bf16,
            "fp16": recipe.fp16,
            "pure_bf16": recipe.pure_bf16,
            "optim": recipe.optim,
            "packing": recipe.packing,
            "flash_attn": recipe.flash_attn,
            # data_args.py: one token less when packing, put back by the packed collator's padding
            "cutoff_len": recipe.cutoff_len
            - recipe.packing * (settings["stage"] != "pt" or "packing" in settings or "neat_packing" in settings),
            "per_device_train_batch_size": recipe.micro_batch,
            "per_device_eval_batch_size": recipe.eval_micro_batch,
            "gradient_accumulation_steps": recipe.gradient_accumulation,
            "do_eval": recipe.evaluates,
            "lora_rank": recipe.lora_rank,
            "lora_target": list(recipe.lora_target),
            "use_dora": recipe.use_dora,
            "use_rslora": recipe.use_rslora,
            "pref_loss": recipe.pref_loss,
            "pref_ftx": recipe.pref_ftx,
            "quantization_bit": recipe.quantization_bit,
            "double_quantization": recipe.double_quantization,
            "enable_liger_kernel": recipe.liger,
            "save_only_model": recipe.save_only_model,
            "save_total_limit": recipe.save_total_limit,
            "torch_empty_cache_steps": recipe.torch_empty_cache_steps,
        }
        assert {key: result[key] for key in expected} == expected
    assert compared >= 15


@pytest.mark.parametrize(("method", "bits"), [("bnb", 3), ("eetq", 4), ("hqq", 7), ("bnb", 4), ("bnb", 8), ("eetq", 8)])
def test_bits_are_refused_as_by_the_quantization_code(method, bits, ours):
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.quantization import configure_quantization
    from transformers import PretrainedConfig

    try:
        arguments = ModelArguments(model_name_or_path="x", quantization_bit=bits, quantization_method=method)
        configure_quantization(PretrainedConfig(), None, arguments, True, {})
        refused = False
    except ValueError as error:
        refused = "only accepts" in str(error)
    except Exception:  # bits accepted, the method's package is not installed here
        refused = False
    issues = ours({**BASE, **LORA, "quantization_bit": bits, "quantization_method": method}).issues
    assert ("config.quantization-bits" in {issue.id for issue in issues}) is refused


def test_fa3_is_refused_as_by_the_attention_code(ours):
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.attention import configure_attn_implementation
    from transformers import Qwen2Config

    with pytest.raises(NotImplementedError, match="Unknown attention type"):
        configure_attn_implementation(Qwen2Config(), ModelArguments(model_name_or_path="x", flash_attn="fa3"))
    assert [issue.id for issue in ours({**BASE, "flash_attn": "fa3"}).issues] == ["config.flash-attn-fa3"]
