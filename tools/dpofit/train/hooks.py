"""The one registry where patches to other libraries install, uninstall and order themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hook:
    """Wraps one attribute of one library: `wrap` takes what is there and returns what shall stand in its place.

    `target` is `package.module:Class.attribute` or `package.module:function`. Lower `order` sits nearer to the
    original, so of two hooks on one target the higher one runs first. With `only_if_imported` a module that
    nobody has imported yet is left alone instead of being imported for us.
    """

    owner: str  # the component that registers it: "guard", "longdpo", ...
    target: str
    wrap: Callable[[Any], Any]
    order: int = 0
    only_if_imported: bool = False


_originals: dict[str, Any] = {}
_installed: list[Hook] = []


def install(hooks: Iterable[Hook]) -> None:
    """Put `hooks` in place. Installing an owner twice replaces its hooks, so the call is idempotent."""
    wanted = list(hooks)
    for owner in {hook.owner for hook in wanted}:
        uninstall(owner)
    _installed.extend(hook for hook in wanted if not hook.only_if_imported or _module(hook.target) in sys.modules)
    for target in dict.fromkeys(hook.target for hook in wanted):
        _rebuild(target)


def uninstall(owner: str) -> None:
    """Take `owner`'s hooks out; other owners' hooks on the same targets stay, in their order."""
    targets = dict.fromkeys(hook.target for hook in _installed if hook.owner == owner)
    _installed[:] = [hook for hook in _installed if hook.owner != owner]
    for target in targets:
        _rebuild(target)


def installed(owner: str | None = None) -> tuple[Hook, ...]:
    """The hooks in place, in the order they wrap: innermost first."""
    chosen = [hook for hook in _installed if owner is None or hook.owner == owner]
    return tuple(sorted(chosen, key=lambda hook: hook.order))


def _module(target: str) -> str:
    return target.partition(":")[0]


def _rebuild(target: str) -> None:
    wraps = [hook for hook in installed() if hook.target == target]
    if not wraps and target not in _originals:
        return
    holder: Any = importlib.import_module(_module(target))
    *path, name = target.partition(":")[2].split(".")
    for part in path:
        holder = getattr(holder, part)
    value = _originals.setdefault(target, getattr(holder, name))
    for hook in wraps:
        value = hook.wrap(value)
    setattr(holder, name, value)
    if not wraps:
        del _originals[target]
