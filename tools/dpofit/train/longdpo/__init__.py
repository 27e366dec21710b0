"""The long-context pieces: exact replacements for what makes long DPO prompts expensive, each switchable."""

from __future__ import annotations

from collections.abc import Collection

OWNER = "longdpo"  # of every hook of the pieces in `dpofit.train.hooks`
# Sizes that the memory model shares with the pieces; it imports them from here, without torch.
CHUNK_POSITIONS = 512  # answer_logps: no tensor is wider than this many positions by the vocabulary
TILE_TOKENS = 4096  # tiled_mlp: at most; large enough to keep the matrix multiplications busy
# offload_checkpoints. torch rounds every pinned block up to a power of two and never gives it back
# (CachingHostAllocator.h `get_free_block`: `c10::llvm::PowerOf2Ceil`). Slabs that are powers of two lose nothing to
# that, and what is kept lies across their borders, so at most one slab a rank is partly empty.
SLAB_BYTES = 64 * 2**20
ALIGNMENT_BYTES = 512


def install(pieces: Collection[str]) -> None:
    """Put the hooks of `pieces` (names of `dpofit.recipe.long_context.PIECES`) in place and take all others out.

    Idempotent. Each piece is a module of this package, imported only when on, with `hooks() -> list[Hook]` and, where
    not every model will do, `model_problems(config) -> list[Problem]`.
    """
    from importlib import import_module

    from dpofit.recipe.long_context import PIECES
    from dpofit.train import hooks
    from dpofit.train.longdpo.combine import model_check

    chosen = [import_module(f"{__name__}.{piece}") for piece in PIECES if piece in pieces]
    checks = [piece.model_problems for piece in chosen if hasattr(piece, "model_problems")]
    hooks.uninstall(OWNER)
    hooks.install([hook for piece in chosen for hook in piece.hooks()] + ([model_check(checks)] if checks else []))
