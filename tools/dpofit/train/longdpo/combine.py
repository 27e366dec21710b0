"""Refuses, before any weight is loaded, a model that one of the pieces would not be exact on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dpofit.errors import BadInput, Problem
from dpofit.train.hooks import Hook
from dpofit.train.longdpo import OWNER
from dpofit.train.longdpo.families import LOADER

Check = Callable[[Any], list[Problem]]  # takes the transformers config


def model_check(checks: Sequence[Check]) -> Hook:
    """Run `checks` as soon as LLaMA-Factory has settled a model's config (0.9.5 model/loader.py 141).

    Raises BadInput with every problem of every piece at once.
    """

    def wrap(stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def patch_config(config: Any, *args: Any, **kwargs: Any) -> None:
            stock(config, *args, **kwargs)
            if problems := [problem for check in checks for problem in check(config)]:
                raise BadInput(problems)

        return patch_config

    return Hook(OWNER, f"{LOADER}:patch_config", wrap)
