"""The short list of requests that the allocator replay reads, against the program it stands for."""

from dpofit.memory.program import Event, Phase, Repeat
from dpofit.memory.unroll import requests


def _replayed(phase: Phase) -> dict[str, int]:
    """Storages alive at the end, by playing the requests one by one."""
    alive: dict[str, int] = {}
    for storage, size_bytes, _ in requests(phase):
        if size_bytes > 0:
            assert storage not in alive
            alive[storage] = size_bytes
        else:
            assert alive.pop(storage) == -size_bytes
    return alive


def test_a_weight_gathered_twice_a_layer_once_of_the_next_is_freed_as_often_as_it_came() -> None:
    """As in a ZeRO-3 backward that prefetches: the recomputation's weight goes, comes again, and the next layer's
    arrives ahead. Layers 9 down to 0; layer 9's weight is there before, layer -1's stays."""
    layer = (
        Event("weight", -4, "gathered"),
        Event("weight", 4, "gathered"),
        Event("weight", 4, "gathered", shift=-1),
        Event("weight", -4, "gathered"),
    )
    phase = Phase("backward", 2, (Event("weight#9", 4, "gathered"), Repeat(layer, 10, 9, True)))
    assert _replayed(phase) == {"weight#-1": 4}


def test_what_lives_on_after_its_layer_is_in_the_list_in_order() -> None:
    layer = (
        Event("temporary", 2, "workspace"),
        Event("checkpoint", 8, "checkpoints"),
        Event("temporary", -2, "workspace"),
    )
    phase = Phase("forward", 1, (Repeat(layer, 6, 0, False),))
    assert _replayed(phase) == {f"checkpoint#{index}": 8 for index in range(6)}


def test_whole_every_layer_is_in_the_list_with_its_temporaries() -> None:
    layer = (
        Event("temporary", 2, "workspace"),
        Event("checkpoint", 8, "checkpoints"),
        Event("temporary", -2, "workspace"),
    )
    phase = Phase("forward", 1, (Repeat(layer, 6, 0, False),))
    sizes = [size_bytes for _, size_bytes, _ in requests(phase, whole=True)]
    assert sizes == [2, 8, -2] * 6
    assert len(requests(phase)) < len(sizes)
