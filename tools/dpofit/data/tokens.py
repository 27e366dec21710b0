"""Counts a pair's tokens: exactly, with the model's own tokenizer.json, or as an estimate that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpofit.data.convert import Pair
from dpofit.data.templates import Layout, Special, Template, Thinking, lay_out, templates
from dpofit.data.tokenizer import Tokenizer, load_tokenizer
from dpofit.data.truncate import Lengths, truncated

# Alibaba's Qwen documentation, "Key concepts": 1 token is 3-4 characters of English, 1.5-1.8 of Chinese.
LATIN_CHARS_PER_TOKEN = (3.0, 4.0)
CJK_CHARS_PER_TOKEN = (1.5, 1.8)
_CJK = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair's tokens before and after `cutoff_len`, and what the cut took."""

    lengths: Lengths
    kept: Lengths  # equal to `lengths` when nothing is cut
    exact: bool
    chosen_loses_eos: bool
    rejected_loses_eos: bool
    made_identical: bool  # the answers differed before the cut and do not after it

    @property
    def cut(self) -> bool:
        return self.kept != self.lengths

    @property
    def prompt_cut(self) -> bool:
        return self.kept.prompt < self.lengths.prompt


class ExactCounter:
    """Token counts as LLaMA-Factory's `encode_oneturn` gives them for this tokenizer and template.

    When transformers may build another pipeline than tokenizer.json's (`tokenizer.doubt`), they count as inexact.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, thinking: Thinking, default_system: str | None
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._thinking, self._default_system = thinking, default_system
        self._estimate = EstimateCounter(template, thinking, default_system)
        kind = "not quite exact" if tokenizer.doubt else "exact"
        self.basis = f"{kind}: {tokenizer.source}, template {template.name}"

    def measure(self, pairs: Sequence[Pair], cutoff_len: int | None) -> list[Measured]:
        """One Measured per pair; pairs with tools, function calls or media are estimated and say so."""
        exact = [self.template.encodes_exactly(pair) for pair in pairs]
        layouts = [self._lay_out(pair) for pair, is_exact in zip(pairs, exact, strict=True) if is_exact]
        encoded = iter(self._encode(layouts))
        return [
            self._measured(*next(encoded), cutoff_len) if is_exact else self._estimate.measure([pair], cutoff_len)[0]
            for pair, is_exact in zip(pairs, exact, strict=True)
        ]

    def ids(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        """Token ids of prompt, chosen and rejected, before any cut."""
        return self._encode([self._lay_out(pair)])[0]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode_batch([text])[0])

    def clip(self, text: str, tokens: int) -> str:
        """The longest head of `text` that is at most `tokens` tokens."""
        return self.tokenizer.head(text, tokens)

    def _lay_out(self, pair: Pair) -> Layout:
        return lay_out(self.template, pair, self._thinking, self._default_system)

    def _encode(self, layouts: list[Layout]) -> list[tuple[list[int], list[int], list[int]]]:
        parts = [part for layout in layouts for part in (layout.prompt, layout.chosen, layout.rejected)]
        texts = [piece for part in parts for piece in part if isinstance(piece, str)]
        ids = iter(self.tokenizer.encode_batch(texts))
        flat = [[i for piece in part for i in self._piece(piece, ids)] for part in parts]
        return [(flat[n], flat[n + 1], flat[n + 2]) for n in range(0, len(flat), 3)]

    def _piece(self, piece: str | Special, ids: Any) -> list[int]:
        return next(ids) if isinstance(piece, str) else self.tokenizer.special(piece.name)

    def _measured(self, prompt: list[int], chosen: list[int], rejected: list[int], cutoff_len: int | None) -> Measured:
        lengths = Lengths(len(prompt), len(chosen), len(rejected))
        kept = truncated(lengths, cutoff_len) if cutoff_len else lengths
        head, tail = chosen[: kept.chosen], rejected[: kept.rejected]
        return Measured(
            lengths,
            kept,
            exact=not self.tokenizer.doubt,
            chosen_loses_eos=self._loses_eos(chosen, kept.chosen),
            rejected_loses_eos=self._loses_eos(rejected, kept.rejected),
            made_identical=head == tail and chosen != rejected,
        )

    def _loses_eos(self, ids: list[int], kept: int) -> bool:
        eos = self.tokenizer.eos_id(self.template)
        return kept < len(ids) and eos in ids[kept:]


class EstimateCounter:
    """Token counts from characters: the middle of the documented range, for want of the tokenizer."""

    def __init__(self, template: Template | None, thinking: Thinking, default_system: str | None) -> None:
        self._template = template if template is not None and template.kind else None
        self._thinking, self._default_system = thinking, default_system
        self.basis = "estimated from characters"

    def measure(self, pairs: Sequence[Pair], cutoff_len: int | None) -> list[Measured]:
        return [self._measured(pair, cutoff_len) for pair in pairs]

    def count(self, text: str) -> int:
        low, high = estimated_range(text)
        return round((low + high) / 2)

    def clip(self, text: str, tokens: int) -> str:
        total = self.count(text)
        return text if total <= tokens else text[: len(text) * tokens // total]

    def _measured(self, pair: Pair, cutoff_len: int | None) -> Measured:
        lengths = self._lengths(pair)
        kept = truncated(lengths, cutoff_len) if cutoff_len else lengths
        return Measured(
            lengths,
            kept,
            exact=False,
            chosen_loses_eos=kept.chosen < lengths.chosen,
            rejected_loses_eos=kept.rejected < lengths.rejected,
            made_identical=_same_after(pair, lengths, kept),
        )

    def _lengths(self, pair: Pair) -> Lengths:
        if self._template is None or not self._template.encodes_exactly(pair):
            text = pair.prompt_text + pair.tools
            return Lengths(self.count(text), self.count(pair.chosen.content) + 1, self.count(pair.rejected.content) + 1)
        layout = lay_out(self._template, pair, self._thinking, self._default_system)
        return Lengths(self._part(layout.prompt), self._part(layout.chosen), self._part(layout.rejected))

    def _part(self, pieces: tuple[str | Special, ...]) -> int:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return self.count(text) + sum(isinstance(piece, Special) for piece in pieces)


Counter = ExactCounter | EstimateCounter


def estimated_range(text: str) -> tuple[float, float]:
    """(least, most) tokens of a text by the documented characters per token."""
    cjk = len(_CJK.findall(text)) if not text.isascii() else 0
    other = len(text) - cjk
    return (
        other / LATIN_CHARS_PER_TOKEN[1] + cjk / CJK_CHARS_PER_TOKEN[1],
        other / LATIN_CHARS_PER_TOKEN[0] + cjk / CJK_CHARS_PER_TOKEN[0],
    )


def _same_after(pair: Pair, lengths: Lengths, kept: Lengths) -> bool:
    """Whether two different answers share all the characters that a cut of both would leave."""
    if kept.chosen == lengths.chosen or kept.rejected == lengths.rejected or pair.chosen == pair.rejected:
        return False
    characters = len(pair.chosen.content) * kept.chosen // lengths.chosen
    return pair.chosen.content[:characters] == pair.rejected.content[:characters]


def counter_for(
    template_name: str | None, model_folder: Path | None, thinking: Thinking, default_system: str | None
) -> tuple[Counter, str]:
    """The best counter at hand, and why it is only an estimate ("" when it is exact)."""
    template = templates().get(template_name or "")
    estimate = EstimateCounter(template, thinking, default_system)
    if template_name is None:
        return estimate, "no template is given"
    if template is None:
        return estimate, f"template {template_name!r} is not one of LLaMA-Factory 0.9.5"
    if not template.kind:
        return estimate, f"template {template_name} is of a class that is not reproduced"
    if model_folder is None:
        return estimate, "the model is not a local folder"
    tokenizer = load_tokenizer(model_folder)
    if isinstance(tokenizer, str):
        return estimate, tokenizer
    tokenizer.prepare(template)
    return ExactCounter(tokenizer, template, thinking, default_system), tokenizer.doubt
