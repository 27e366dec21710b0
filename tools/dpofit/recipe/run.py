"""A recipe as the rules look at it: its settings and ZeRO stage, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.recipe.recipe import ZeroConfig
from dpofit.recipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Run:
    """Settings whose values have the right types, and the ZeRO config they name (None without DeepSpeed)."""

    settings: Settings
    zero: ZeroConfig | None
    long_context: frozenset[str] = frozenset()  # pieces that are on (long_context.PIECES)

    @property
    def zero3(self) -> bool:
        """transformers' is_deepspeed_zero3_enabled()."""
        return self.zero is not None and self.zero.stage == 3

    @property
    def do_eval(self) -> bool:
        """transformers sets do_eval whenever eval_strategy is not "no" (training_args.py 1498)."""
        return self.settings.on("do_eval") or self.settings["eval_strategy"] != "no"

    @property
    def stage(self) -> str:
        """`stage`."""
        return str(self.settings["stage"])

    @property
    def method(self) -> str:
        """`finetuning_type`."""
        return str(self.settings["finetuning_type"])

    @property
    def uses_reference(self) -> bool:
        """finetuning_args.py use_ref_model."""
        return self.stage == "dpo" and self.settings["pref_loss"] not in ("orpo", "simpo")

    @property
    def quantized(self) -> bool:
        """Quantized on the fly; a model that is stored quantized is known only from its config."""
        return self.settings["quantization_bit"] is not None
