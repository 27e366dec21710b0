"""The coordinator, on sequences small enough to follow by hand."""

from __future__ import annotations

import pytest

from dpofit.memory.step import build_program, plan_steps
from dpofit.memory.zero3 import Action, CoordinatorConfig, coordinate, left_gathered, retraced, untraced
from tests.memory.jobs import job, tiny, zero

A, B, C = 1, 2, 3
SIZES = {A: (100,), B: (100,), C: (100,)}


def hooks(*steps: str) -> list[tuple[bool, int]]:
    """`+A` fetches before A, `-A` releases after it."""
    return [(step[0] == "+", {"A": A, "B": B, "C": C}[step[1]]) for step in steps]


FORWARD = hooks("+A", "-A", "+B", "-B", "+C", "-C")


def config(**sizes: int) -> CoordinatorConfig:
    values = {"prefetch_bucket": 0, "max_live": 10**9, "max_reuse_distance": 0, "persistence_threshold": 0, **sizes}
    return CoordinatorConfig(**values)


def test_without_prefetch_each_module_is_gathered_and_released_in_turn():
    done = coordinate(FORWARD, SIZES, config())
    assert done == [(Action(fetch, module, 100),) for fetch, module in FORWARD]


def test_prefetch_overshoots_by_up_to_one_parameter():
    done = coordinate(FORWARD, SIZES, config(prefetch_bucket=1))
    assert done[0] == (Action(True, A, 100), Action(True, B, 100))  # one element asked for, a whole parameter came


def test_several_parameters_fetched_in_one_call_arrive_in_a_flat_buffer_that_goes_when_the_last_is_met():
    done = coordinate(FORWARD, SIZES, config(prefetch_bucket=200))
    assert done[0] == (Action(True, A, 100), Action(True, C, 200, flat=True))
    assert done[2] == (Action(True, B, 100, copied=True), Action(True, C, 100, copied=True))
    assert done[4] == (Action(False, C, 200, flat=True),)


def test_max_live_stops_prefetch():
    assert coordinate(FORWARD, SIZES, config(prefetch_bucket=200, max_live=100))[0] == (Action(True, A, 100),)


def test_a_parameter_soon_used_again_is_not_released():
    both_ways = hooks("+A", "-A", "+B", "-B", "+B", "-B", "+A", "-A")
    done = coordinate(both_ways, SIZES, config(max_reuse_distance=1))
    assert done[3] == () and done[4] == ()  # B is next in the trace
    assert done[1] == (Action(False, A, 100),)  # 200 elements pass before A is met again


def test_parameters_at_or_below_the_threshold_never_move():
    assert coordinate(FORWARD, SIZES, config(persistence_threshold=100)) == [()] * 6


def test_without_a_complete_trace_modules_are_released_at_once_and_gathered_once():
    done = untraced([(True, A), (True, A), (False, A), (True, B)], {A: 100, B: 0})
    assert done == [(Action(True, A, 100),), (), (Action(False, A, 100),), ()]


def test_what_the_micro_batch_before_left_gathered_is_not_gathered_again_and_goes_when_it_is_passed():
    done = coordinate(FORWARD, SIZES, config(prefetch_bucket=1), found=frozenset({A}))
    # nothing to gather for A, so the one prefetch takes B; C is taken when B is met
    assert done[:3] == [(Action(True, B, 100),), (Action(False, A, 100),), (Action(True, C, 100),)]
    assert left_gathered(done) == frozenset()
    assert left_gathered(coordinate([*FORWARD, (True, B)], SIZES, config())) == {B}


def test_a_forward_that_leaves_the_record_lets_go_of_what_came_early_and_goes_on_without():
    policy, reference = hooks("+A", "-A", "+B", "-B", "+C", "-C"), hooks("+A", "-A", "+C", "-C")
    done = retraced([policy, reference], SIZES, config(prefetch_bucket=1))
    assert done[:6] == [(Action(fetch, module, 100),) for fetch, module in policy]  # recorded: nothing ahead
    assert done[6] == (Action(True, A, 100), Action(True, B, 100))  # as recorded, so B is fetched ahead
    assert done[8] == (Action(False, B, 100), Action(True, C, 100))  # not B: B goes, C is gathered when met
    assert left_gathered(done) == frozenset()


def test_parameters_fetched_ahead_in_one_buffer_are_copied_out_of_it_before_they_go():
    policy, reference = hooks("+A", "-A", "+B", "-B", "+C", "-C"), hooks("+A", "-A")
    shorter = retraced([policy, [*reference, (True, 9)]], SIZES | {9: (7,)}, config(prefetch_bucket=200))
    assert shorter[8] == (
        Action(True, C, 200, copied=True), Action(False, C, 200), Action(False, C, 200, flat=True), Action(True, 9, 7),
    )  # fmt: skip


def test_small_parameters_stay_only_under_a_whole_record():
    done = retraced([hooks("+A", "-A"), hooks("+B", "-B")], SIZES, config(persistence_threshold=100))
    assert done[0] == (Action(True, A, 100),) and done[1] == (Action(False, A, 100),)


@pytest.mark.parametrize(
    ("finetuning", "module", "goes"), [("full", "root", "optimizer_step"), ("lora", "wrapper", "forward")]
)
def test_a_head_that_ligers_loss_reads_is_fetched_with_the_module_around_it(finetuning, module, goes):
    planned = job(tiny(), prompt=64, response=64, stage="sft", finetuning=finetuning, liger=True, zero=zero(3))
    steady = [
        (phase.name, event.size_bytes)
        for phase, _, event in build_program(planned, plan_steps(planned)).events()
        if phase.step == 2 and event.tag == f"policy.gather.{module}"
    ]
    head_bytes = 1000 * 64 * 2
    assert steady == [("forward", head_bytes), (goes, -head_bytes)]
