"""Sends the files of DeepSpeed's `save_checkpoint` through the bounded writer, and keeps ranks in step if one fails.

`save_checkpoint` has barriers between its writes. A rank that raised would leave the others waiting there for the
process group's timeout, so failures are noted, the rank goes on to the last barrier, and the guard's next round
reports them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpofit.train.guard.backends import Extents
from dpofit.train.guard.config import GuardConfig
from dpofit.train.guard.steps import reached
from dpofit.train.guard.stock import instance_attribute
from dpofit.train.guard.torch_file import save_bounded


@contextmanager
def guarded_engine(engine: Any, folder: Path, config: GuardConfig, failures: list[str]) -> Iterator[Extents]:
    """While open, `engine.save_checkpoint` into `folder` writes bounded; yields the extents written so far.

    Only for DeepSpeed's own TorchCheckpointEngine; other engines (Nebula, DataStates, Fast) keep their writers.
    """
    extents: Extents = {}
    writer = engine.checkpoint_engine

    def noting(action: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(action)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if failures:
                return None
            try:
                return action(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                failures.append(f"{type(error).__name__}: {error}")
                return None

        return noted

    def save(state_dict: Any, path: str) -> None:
        relative = os.path.relpath(path, folder)
        extents[relative] = save_bounded(state_dict, folder, relative, config)

    stock_save_checkpoint = engine.save_checkpoint

    @functools.wraps(stock_save_checkpoint)
    def save_checkpoint(
        save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True, **kw: Any
    ) -> Any:
        reached("state-started")
        done = stock_save_checkpoint(save_dir, tag, client_state or {}, save_latest=False, **kw)
        if save_latest and engine.global_rank == 0:
            latest = str(tag) if tag is not None else f"global_step{engine.global_steps}"
            noting((Path(save_dir) / "latest").write_text)(latest)
        return done

    bounded = type(writer).__name__ == "TorchCheckpointEngine"
    with (
        instance_attribute(writer, "save", noting(save if bounded else writer.save)),
        instance_attribute(writer, "makedirs", noting(writer.makedirs)),
        instance_attribute(engine, "_copy_recovery_script", noting(engine._copy_recovery_script)),
        instance_attribute(engine, "save_checkpoint", save_checkpoint),
    ):
        yield extents
