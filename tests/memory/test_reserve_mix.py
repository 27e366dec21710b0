"""A run of mixed lengths, as the allocator meets it: short batches first, the longest rows last."""

from dpofit.memory.program import Event, Phase, Program
from dpofit.memory.reserve import reserved

MIB = 2**20


def _run(size_mib: int) -> Program:
    """Two steps and an evaluation that each allocate and free one tensor."""
    tensor = Event("logits", size_mib * MIB, "logits")
    items = (tensor, tensor._replace(size_bytes=-tensor.size_bytes))
    return Program((Phase("forward", 1, items), Phase("forward", 2, items), Phase("eval", 2, items)))


def _step(size_mib: int) -> Program:
    return Program(_run(size_mib).phases[1:2])


def test_every_longer_batch_takes_a_segment_of_its_own() -> None:
    run = reserved(_run(50), [_run(30), _step(40)], expandable=False, capacity_bytes=None)
    assert run.peak_bytes == (30 + 40 + 50) * MIB


def test_one_length_reserves_what_it_needs() -> None:
    assert reserved(_run(50), [], expandable=False, capacity_bytes=None).peak_bytes == 50 * MIB


def test_an_expandable_segment_grows_instead() -> None:
    run = reserved(_run(50), [_run(30), _step(40)], expandable=True, capacity_bytes=None)
    assert run.peak_bytes == 60 * MIB  # pages of 20 MiB


def test_short_of_room_the_shorter_batches_segments_are_given_back_and_the_step_retried() -> None:
    run = reserved(_run(50), [_run(30), _step(40)], expandable=False, capacity_bytes=80 * MIB)
    assert not run.out_of_memory
    assert run.retries_per_step > 0
    assert run.peak_bytes == 70 * MIB


def test_evaluation_happens_once_with_the_longest_rows() -> None:
    run = reserved(_run(50), [_run(30)], expandable=False, capacity_bytes=None)
    assert run.phases["eval"] == (30 + 50) * MIB
