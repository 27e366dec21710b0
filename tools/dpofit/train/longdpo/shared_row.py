"""One pair of DPO rows laid out as a single row, prompt, chosen answer, rejected answer, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpofit.memory import spec


@dataclass(frozen=True, slots=True)
class SharedRow(spec.SharedRow):
    """The parts as the memory model counts them; `padded` is the length of the two rows they were made from."""

    padded: int


def shared_row(input_ids: Tensor, attention_mask: Tensor) -> SharedRow:
    """The layout of two right-padded rows [2, tokens], chosen and rejected.

    The prompt is what both rows begin with, whatever the labels say: shared tokens have equal states, so that is exact
    too where truncation left the prompts different or where both answers begin alike. Each answer keeps at least one
    token. One device synchronisation.
    """
    same = (input_ids[0] == input_ids[1]).cumprod(0).sum()
    common, first, second = torch.stack([same, *attention_mask.sum(1)]).tolist()
    prompt = min(common, first - 1, second - 1)
    return SharedRow(prompt, first - prompt, second - prompt, input_ids.shape[1])


def joined(row: SharedRow, input_ids: Tensor) -> Tensor:
    """Token ids [2, padded] → [1, prompt + chosen + rejected]."""
    return torch.cat([input_ids[0, : row.first], input_ids[1, row.prompt : row.second]])[None]


def positions(row: SharedRow, device: torch.device) -> Tensor:
    """Position ids [1, tokens]: the rejected answer's go on where the prompt ends, as in the row it came from."""
    return torch.cat([torch.arange(row.first, device=device), torch.arange(row.prompt, row.second, device=device)])[
        None
    ]


def parted(row: SharedRow, hidden: Tensor) -> Tensor:
    """States [1, tokens, hidden] → the two rows they stand for, [2, padded, hidden], zero where those have padding."""
    prompt, chosen, rejected = hidden[0].split([row.prompt, row.chosen, row.rejected])
    blanks = [hidden.new_zeros(row.padded - length, hidden.shape[2]) for length in (row.first, row.second)]
    return torch.cat([prompt, chosen, blanks[0], prompt, rejected, blanks[1]]).view(2, row.padded, -1)
