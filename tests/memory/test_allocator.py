"""The replay does what PyTorch's caching allocator is documented to do, case by case and on random traces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_allocator import OutOfMemory, ReferenceAllocator

from dpofit.memory.allocator import AllocatorEvent, Replay, gpu_events, replay
from dpofit.memory.caching_allocator import CachingAllocator
from dpofit.memory.program import Event, Phase, Program, Repeat

MIB = 2**20


def run(*steps: str | tuple[str, float], expandable: bool = False, capacity_mib: float | None = None) -> Replay:
    """Replay steps: `("a", 20)` allocates a of 20 MiB, `("a@side", 20)` on stream side, `"a"` frees it."""
    events: list[AllocatorEvent] = []
    alive: dict[str, AllocatorEvent] = {}
    for step in steps:
        if isinstance(step, tuple):
            storage, _, stream = step[0].partition("@")
            alive[storage] = (storage, round(step[1] * MIB), stream or "compute")
            events.append(alive[storage])
        else:
            storage, size, stream = alive.pop(step)
            events.append((storage, -size, stream))
    capacity = None if capacity_mib is None else round(capacity_mib * MIB)
    return replay(events, expandable=expandable, capacity_bytes=capacity)


def reserved_mib(*steps: str | tuple[str, float], expandable: bool = False) -> float:
    return run(*steps, expandable=expandable).reserved_bytes / MIB


# Sizes


@pytest.mark.parametrize(("size", "allocated"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_a_request_is_rounded_to_512_bytes(size: int, allocated: int) -> None:
    assert replay([("a", size, "s")], expandable=False).allocated_bytes == allocated


@pytest.mark.parametrize(
    ("size", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (21 * MIB, 22),
    ],
)
def test_a_segment_is_2_mib_20_mib_or_the_request_in_steps_of_2_mib(size: int, segment_mib: int) -> None:
    assert replay([("a", size, "s")], expandable=False).reserved_bytes == segment_mib * MIB


def test_small_requests_share_a_segment_and_large_ones_do_not_join_them() -> None:
    assert reserved_mib(("a", 1), ("b", 1)) == 2
    assert reserved_mib(("a", 1), ("b", 1), ("c", 0.5)) == 4
    assert reserved_mib(("a", 0.5), ("b", 1.5)) == 22


def test_two_requests_of_8_mib_share_a_buffer_of_20_mib() -> None:
    assert reserved_mib(("a", 8), ("b", 8)) == 20
    assert reserved_mib(("a", 8), ("b", 8), ("c", 8)) == 40


# Reuse


def test_freed_memory_stays_reserved_and_is_used_again() -> None:
    result = run(("a", 40), "a", ("b", 40))
    assert (result.reserved_bytes, result.allocated_bytes) == (40 * MIB, 40 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    # b takes the 40 MiB block whole, so c finds the 60 MiB one
    assert reserved_mib(("x", 60), ("y", 40), "x", "y", ("b", 40), ("c", 60)) == 100


def test_memory_of_one_stream_is_not_used_for_another() -> None:
    assert reserved_mib(("a@side", 40), "a", ("b", 40)) == 80


def test_neighbours_merge_when_freed() -> None:
    steps = [("x", 60), "x", ("a", 20), ("b", 20), ("c", 20), "a", "c", "b", ("d", 60)]
    assert reserved_mib(*steps) == 60


def test_blocks_of_two_segments_never_merge() -> None:
    assert reserved_mib(("a", 20), ("b", 20), "a", "b", ("c", 40)) == 80


def test_a_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    assert run(("x", 20), "x", ("a", 19)).allocated_bytes == 20 * MIB
    assert run(("x", 20), "x", ("a", 18.5)).allocated_bytes == 18.5 * MIB
    assert run(("x", 20), "x", ("a", 19), expandable=True).allocated_bytes == 19 * MIB


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    assert run(("x", 1), "x", ("a", 0.75)).allocated_bytes == 0.75 * MIB


def test_sequences_that_grow_leave_their_smaller_selves_reserved() -> None:
    """The classic: batches of ever longer rows, each freed before the next."""
    growing = [step for size in (100, 110, 120, 130) for step in ((f"{size}", size), f"{size}")]
    assert reserved_mib(*growing) == 100 + 110 + 120 + 130
    assert reserved_mib(*growing, expandable=True) == 140


# Pressure


def test_at_capacity_wholly_free_segments_are_released_and_the_request_retried() -> None:
    result = run(("a", 40), ("b", 40), "a", "b", ("c", 60), capacity_mib=100)
    assert result.out_of_memory is None
    assert (result.retries, result.reserved_bytes, result.peak_reserved_bytes) == (1, 60 * MIB, 80 * MIB)


def test_a_segment_with_one_live_block_cannot_be_released() -> None:
    steps = [("x", 60), "x", ("keep", 20), ("y", 50)]
    fragmented = run(*steps, capacity_mib=100)
    assert fragmented.out_of_memory is not None
    assert fragmented.out_of_memory.storage == "y"
    assert fragmented.out_of_memory.size_bytes == 50 * MIB
    assert fragmented.out_of_memory.reserved_bytes == 60 * MIB
    assert fragmented.out_of_memory.allocated_bytes == 20 * MIB
    assert run(*steps, expandable=True, capacity_mib=100).out_of_memory is None


def test_a_segment_of_another_stream_is_released_too() -> None:
    assert run(("a@side", 60), "a", ("b", 60), capacity_mib=100).out_of_memory is None


def test_what_does_not_fit_at_all_fails_without_a_trace() -> None:
    result = run(("a", 200), capacity_mib=100)
    assert result.out_of_memory is not None
    assert (result.reserved_bytes, result.retries) == (0, 1)


def test_replay_ends_at_the_first_failure() -> None:
    result = run(("a", 80), ("b", 80), "b", "a", ("c", 10), capacity_mib=100)
    assert result.allocated_bytes == 80 * MIB
    assert result.out_of_memory is not None
    assert result.out_of_memory.storage == "b"


# Expandable segments


def test_an_expandable_segment_grows_in_pages_of_20_mib_or_2_mib_for_small_requests() -> None:
    assert reserved_mib(("a", 41), expandable=True) == 60
    assert reserved_mib(("a", 41), ("b", 19), expandable=True) == 60
    assert reserved_mib(("a", 0.5), expandable=True) == 2


def test_a_free_block_at_the_edge_grows_instead_of_a_new_one_being_made() -> None:
    assert reserved_mib(("a", 20), ("b", 40), "b", ("c", 60), expandable=True) == 80


def test_best_fit_prefers_a_larger_block_inside_to_the_edge_that_could_still_grow() -> None:
    # Free: 20 MiB at the edge, 40 MiB inside. a takes 20 of the 40, so the edge is left to grow by 40 for b.
    setup = [("hole", 40), ("wall", 20), ("edge", 20), "hole", "edge"]
    assert reserved_mib(*setup, ("a", 20), ("b", 60), expandable=True) == 40 + 20 + 60


def test_under_pressure_pages_move_to_the_end() -> None:
    # 40 free MiB are split by a live block; their pages are unmapped and mapped anew behind it
    result = run(("a", 40), ("wall", 20), ("b", 20), "a", ("c", 60), expandable=True, capacity_mib=100)
    assert result.out_of_memory is None
    assert result.retries == 1
    assert (result.allocated_bytes, result.reserved_bytes) == (100 * MIB, 100 * MIB)


def test_a_page_with_one_live_byte_stays_mapped() -> None:
    result = run(("a", 19), ("keep", 2), ("b", 19), "a", "b", ("c", 40), expandable=True, capacity_mib=60)
    assert result.out_of_memory is not None
    assert result.out_of_memory.allocated_bytes == 2 * MIB
    assert result.out_of_memory.reserved_bytes == 40 * MIB


# Phases and programs


def test_peaks_are_kept_by_phase_and_stretches_of_one_phase_count_together() -> None:
    events = [
        ("forward", 0, ""), ("a", 40 * MIB, "s"),
        ("backward", 0, ""), ("b", 20 * MIB, "s"), ("a", -40 * MIB, "s"),
        ("forward", 0, ""), ("c", 30 * MIB, "s"),
    ]  # fmt: skip
    forward, backward = replay(events, expandable=False).phases
    assert (forward.phase, forward.allocated_bytes, forward.reserved_bytes) == ("forward", 50 * MIB, 60 * MIB)
    assert (backward.phase, backward.allocated_bytes, backward.reserved_bytes) == ("backward", 60 * MIB, 60 * MIB)


def test_retries_are_counted_in_the_phase_they_happen_in() -> None:
    events = [("one", 0, ""), ("a", 60 * MIB, "s"), ("a", -60 * MIB, "s"), ("two", 0, ""), ("b", 80 * MIB, "s")]
    one, two = replay(events, expandable=False, capacity_bytes=100 * MIB).phases
    assert (one.retries, two.retries) == (0, 1)


def test_a_failure_names_its_phase() -> None:
    events = [("load", 0, ""), ("a", 40 * MIB, "s"), ("forward", 0, ""), ("b", 80 * MIB, "s")]
    failure = replay(events, expandable=False, capacity_bytes=100 * MIB).out_of_memory
    assert failure is not None
    assert failure.phase == "forward"


def test_a_program_gives_its_gpu_events_with_a_mark_per_phase() -> None:
    layer = Repeat((Event("w", 4, "weights"), Event("host", 8, "weights", space="host_pinned")), times=2)
    program = Program((Phase("load", 0, (layer,)), Phase("forward", 1, (Event("x", 2, "logits", stream="comm"),))))
    assert list(gpu_events(program)) == [
        (("load", 0), 0, ""), ("w#0", 4, "compute"), ("w#1", 4, "compute"),
        (("forward", 1), 0, ""), ("x", 2, "comm"),
    ]  # fmt: skip


def test_an_impossible_sequence_is_an_error_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="a is alive already"):
        replay([("a", 1, "s"), ("a", 1, "s")], expandable=False)
    with pytest.raises(AssertionError, match="b is not alive"):
        replay([("b", -1, "s")], expandable=False)


# What real torch printed. stas00/ml-engineering 744d01e debug/pytorch.md, one B200 of 178.35 GiB.

B200_FREE_BYTES = round((178.35 - 0.70) * 2**30)  # less the context: 168.34 in use - 167.64 allocated


def test_a_printed_out_of_memory_in_forward_is_reproduced() -> None:
    """x, y and z of 15e9 floats; the fourth fails with 167.64 GiB allocated, 4.62 MiB reserved beside it."""
    tensor = 4 * 15 * 10**9
    result = replay([(n, tensor, "s") for n in "xyzl"], expandable=False, capacity_bytes=B200_FREE_BYTES)
    failure = result.out_of_memory
    assert failure is not None
    assert failure.storage == "l"
    assert f"{failure.allocated_bytes / 2**30:.2f}" == "167.64"
    assert f"{(failure.reserved_bytes - failure.allocated_bytes) / MIB:.2f}" == "4.62"


def test_a_printed_out_of_memory_in_backward_is_reproduced() -> None:
    """Four tensors of 10e9 floats, the sum and its gradient; 149.01 GiB allocated, 6.11 MiB reserved beside."""
    tensor = 4 * 10 * 10**9
    events = [(n, tensor, "s") for n in "xyzl"] + [("sum", 4, "s"), ("ones", 4, "s"), ("grad", tensor, "s")]
    failure = replay(events, expandable=False, capacity_bytes=B200_FREE_BYTES).out_of_memory
    assert failure is not None
    assert failure.storage == "grad"
    assert f"{failure.allocated_bytes / 2**30:.2f}" == "149.01"
    assert f"{(failure.reserved_bytes - failure.allocated_bytes) / MIB:.2f}" == "6.11"


# Random traces

SIZES = st.one_of(
    st.integers(1, 2 * MIB),
    st.integers(1, 80).map(lambda n: n * MIB // 2),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 10 * MIB - 512, 19 * MIB, 20 * MIB, 40 * MIB]),
)
# Each step: what to free (an index into what lives, or none), then a size to allocate and its stream.
STEPS = st.lists(st.tuples(st.integers(0, 8), SIZES, st.sampled_from(["compute", "comm"])), max_size=60)
CAPACITIES = st.sampled_from([64 * MIB, 150 * MIB, 300 * MIB, 10_000 * MIB])


def trace(steps: list[tuple[int, int, str]]) -> list[AllocatorEvent]:
    events: list[AllocatorEvent] = []
    alive: list[AllocatorEvent] = []
    for number, (choice, size, stream) in enumerate(steps):
        for _ in range(2 if choice > 5 else 1 if choice > 1 else 0):
            if alive:
                storage, freed, on = alive.pop(choice % len(alive))
                events.append((storage, -freed, on))
        alive.append((number, size, stream))
        events.append(alive[-1])
    return events


@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=250, deadline=None)
@given(steps=STEPS, capacity=CAPACITIES)
def test_it_agrees_with_a_transcription_of_torchs_allocator(expandable: bool, steps, capacity: int) -> None:
    events = trace(steps)
    reference = ReferenceAllocator(expandable, capacity)
    failed = None
    for storage, size, stream in events:
        try:
            reference.malloc(storage, size, stream) if size > 0 else reference.free(storage)
        except OutOfMemory:
            failed = storage
            break
    result = replay(events, expandable=expandable, capacity_bytes=capacity)
    assert (result.out_of_memory and result.out_of_memory.storage) == failed
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes, result.retries) == (
        reference.peak_allocated,
        reference.peak_reserved,
        reference.retries,
    )
    assert (result.allocated_bytes, result.reserved_bytes) == (reference.allocated, reference.reserved)


@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=100, deadline=None)
@given(steps=STEPS, capacity=CAPACITIES)
def test_live_blocks_never_overlap_and_reserved_bounds_allocated(expandable: bool, steps, capacity: int) -> None:
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity)
    for storage, size, stream in trace(steps):
        if size < 0:
            allocator.free(storage)
        elif not allocator.malloc(storage, size, stream):
            break
    blocks = sorted((address, size) for _, address, size in allocator.blocks())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(blocks))
    assert allocator.allocated_bytes == sum(size for _, size in blocks)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes <= capacity
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes


@settings(max_examples=20, deadline=None)
@given(steps=STEPS)
def test_the_same_events_give_the_same_answer(steps) -> None:
    events = trace(steps)
    assert replay(events, expandable=True) == replay(events, expandable=True)
