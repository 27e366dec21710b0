"""Writes down the gathers and releases of a ZeRO-3 engine, real or over fake tensors: names, sizes, order."""

from __future__ import annotations

from typing import Any

Entry = tuple[str, tuple[str, ...], int]  # ("gather" or "release", parameter names, elements)


def record_sequence(engine: Any, log: list[Entry]) -> None:
    """From now on `log` grows with every gather and release that changes what is on the card.

    Within one gather, and within releases that follow each other, order means nothing (DeepSpeed walks sets): sorted.
    """
    names = {param.ds_id: name for name, param in engine.module.named_parameters()}
    for param in engine.module.parameters():
        param.all_gather_coalesced = _gather(param.all_gather_coalesced, names, log)
        param.partition = _release(param, param.partition, names, log)


def _gather(gather: Any, names: dict[int, str], log: list[Entry]) -> Any:
    def recorded(params: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(("gather", tuple(sorted(names[p.ds_id] for p in params)), sum(p.ds_numel for p in params)))
        return gather(params, *args, **kwargs)

    return recorded


def _release(param: Any, partition: Any, names: dict[int, str], log: list[Entry]) -> Any:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if param.ds_status.name == "AVAILABLE":
            last = log.pop() if log and log[-1][0] == "release" else ("release", (), 0)
            log.append(("release", tuple(sorted((*last[1], names[param.ds_id]))), last[2] + param.ds_numel))
        return partition(*args, **kwargs)

    return recorded
