"""What `cutoff_len` does to a pair, as LLaMA-Factory truncates it."""

from __future__ import annotations

from dataclasses import dataclass


def infer_seqlen(source_tokens: int, target_tokens: int, cutoff_len: int) -> tuple[int, int]:
    """(prompt, answer) tokens that remain; llamafactory 0.9.5 data/processor/processor_utils.py 76-88."""
    if target_tokens * 2 < cutoff_len:
        most_target = cutoff_len
    elif source_tokens * 2 < cutoff_len:
        most_target = cutoff_len - source_tokens
    else:
        most_target = int(cutoff_len * (target_tokens / (source_tokens + target_tokens)))
    target = min(most_target, target_tokens)
    return min(max(cutoff_len - target, 0), source_tokens), target


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one pair, template included."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def row(self) -> int:
        """Tokens of the longer of the pair's two sequences: what its batch is padded to, before rounding."""
        return self.prompt + max(self.chosen, self.rejected)


def truncated(lengths: Lengths, cutoff_len: int) -> Lengths:
    """Tokens after `cutoff_len`; llamafactory 0.9.5 data/processor/pairwise.py 57-63 cuts all three from the tail."""
    source, target = infer_seqlen(lengths.prompt, max(lengths.chosen, lengths.rejected), cutoff_len)
    return Lengths(source, min(lengths.chosen, target), min(lengths.rejected, target))
