"""The save guard: a checkpoint save that cannot kill the job. `guard.install()` is all a script needs."""

from __future__ import annotations


def install() -> None:
    """Guard every Hugging Face Trainer of this process. Idempotent; imports transformers.

    Settings come from the environment: DPOFIT_GUARD, _MEMORY, _TIMEOUT, _ON_FAILURE (docs/save-guard.md).
    BadInput if one of them makes no sense.
    """
    from dpofit.train import hooks
    from dpofit.train.guard.config import read_config
    from dpofit.train.guard.patches import guard_hooks

    read_config()
    hooks.install(guard_hooks())


def uninstall() -> None:
    """Put the stock save code back."""
    from dpofit.train import hooks

    hooks.uninstall("guard")
