"""Everything that reference log-probs depend on, as named fields, so that a stale cache can say what has changed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dpofit
from dpofit.errors import BadInput, Problem
from dpofit.train.longdpo.reference_rows import Example, digest
from dpofit.units import MIB

Key = dict[str, str]

# Settings that change the reference's numbers and are not in its files or in the tokens.
MODEL_SETTINGS = (
    "compute_dtype", "quantization_bit", "quantization_method", "quantization_type", "double_quantization",
    "rope_scaling", "flash_attn", "shift_attn", "mixture_of_depths", "enable_liger_kernel", "upcast_layernorm",
    "upcast_lmhead_output", "resize_vocab",
)  # fmt: skip
PACKAGES = ("llamafactory", "transformers", "torch")


def reference_key(
    model_args: Any,
    data_args: Any,
    training_args: Any,
    finetuning_args: Any,
    of: Mapping[str, Sequence[Example]],
) -> Key:
    """The fields, flat and in order. Reads the model's files: whole config and index, of each shard header, size and
    one MiB. BadInput where the model has no files to know it by."""
    key: Key = {"dpofit": dpofit.__version__}
    key |= {package: importlib.metadata.version(package) for package in PACKAGES}
    key["stage"] = finetuning_args.stage
    key["log-probs"] = "mean" if finetuning_args.pref_loss == "ipo" and finetuning_args.stage == "dpo" else "sum"
    source, adapters = model_args.model_name_or_path, model_args.adapter_name_or_path or []
    if finetuning_args.ref_model is not None:
        source, adapters = finetuning_args.ref_model, finetuning_args.ref_model_adapters or []
        adapters = [adapters] if isinstance(adapters, str) else adapters
        key["reference"] = "ref_model"
    else:
        key["reference"] = f"the model itself, {finetuning_args.finetuning_type}"
    key |= {f"model {name}": mark for name, mark in _files(_folder(source, model_args))}
    for place, adapter in enumerate(adapters):
        key |= {f"adapter {place} {name}": mark for name, mark in _files(_folder(adapter, model_args))}
    key |= {name: str(getattr(model_args, name, None)) for name in MODEL_SETTINGS}
    key["precision"] = (
        f"bf16 {training_args.bf16}, fp16 {training_args.fp16}, pure_bf16 {finetuning_args.pure_bf16}, "
        f"DeepSpeed {training_args.deepspeed is not None}"
    )
    key["template"], key["cutoff_len"] = str(data_args.template), str(data_args.cutoff_len)
    key |= {f"data {name}": digest(found) for name, found in of.items()}
    return key


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """`cutoff_len was 128, is 64`, … ; empty when the keys are equal."""
    names = [*then, *(name for name in now if name not in then)]
    return [
        f"{name} was {then.get(name, 'absent')}, is {now.get(name, 'absent')}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def _folder(source: str, model_args: Any) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    for name in ("config.json", "adapter_config.json"):
        found = cached_file(
            source, name, cache_dir=model_args.cache_dir, revision=model_args.model_revision,
            token=model_args.hf_hub_token, _raise_exceptions_for_missing_entries=False,
        )  # fmt: skip
        if found is not None:
            return Path(found).parent
    raise BadInput(Problem("recipe", "model_name_or_path", f"{source} has no config.json", "Give a model's folder."))


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            yield name, _sha256((folder / name).read_bytes())
    shards = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for index in sorted(folder.glob("*.index.json")):
        yield index.name, _sha256(index.read_bytes())
        if index.name.split(".index")[0].endswith(".safetensors"):
            shards = sorted(folder / name for name in set(json.loads(index.read_bytes())["weight_map"].values()))
    if not shards:
        raise BadInput(Problem(str(folder), None, "holds no weights that cached_reference could know it by", ""))
    for shard in shards:
        yield shard.name, _shard(shard)


def _shard(path: Path) -> str:
    """Size, and a hash over the header and one MiB from a place that the size decides: a checkpoint that was trained
    on has other bytes everywhere, and reading whole models on every rank would take minutes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header = start + file.read(min(int.from_bytes(start, "little"), 64 * MIB)) if path.suffix != ".bin" else start
        place = int.from_bytes(hashlib.sha256(str(size).encode()).digest()[:8], "little")
        file.seek(len(header) + place % max(1, size - len(header) - MIB))
        return f"{size} bytes, {_sha256(header + file.read(MIB))}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
