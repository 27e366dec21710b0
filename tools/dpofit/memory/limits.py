"""The longest prompt that fits: solved on allocated bytes and the allocator's gap, confirmed by full predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import highest, live_at_end, phase_peaks
from dpofit.memory.overhead import overhead
from dpofit.memory.predict import GPU, Prediction, Verdict, predict, residuals_for
from dpofit.memory.program import Program
from dpofit.memory.scope import check_scope
from dpofit.memory.step import Plan, build_program, plan_steps, steady_step

Binding = Literal["gpu", "host", "disk", "none"]
STEP_TOKENS = 8  # rows are padded to a multiple of it
SEARCHED_TOKENS = 2**22  # with rope_scaling the model's positions follow cutoff_len; no card takes as many


@dataclass(frozen=True, slots=True)
class Limit:
    """Longest prompt in tokens at which the verdict is `fits`, and at which it is not yet `oom`; None: not even 8."""

    prompt_tokens: int | None
    not_oom_prompt_tokens: int | None
    binding: Binding  # what stops the next 8 tokens; none: the model's positions do
    prediction: Prediction | None  # at prompt_tokens


def longest_prompt(job: Job) -> Limit:
    """Search prompts in steps of 8 with the job's answers kept; the mix of shorter batches scales with the prompt."""
    check_scope(job.recipe, job.model)
    plan = plan_steps(job)
    answer = max(job.lengths.chosen, job.lengths.rejected)
    positions = SEARCHED_TOKENS if job.recipe.rope_scaling else job.model.max_positions
    longest = max((positions - answer) // STEP_TOKENS, 0)  # an answer may leave no position
    allocated = allocated_by_steps(job, plan)
    fitting, binding, prediction = _longest_fitting(job, plan, allocated, longest)
    lucky = _longest_not_oom(job, allocated, fitting, longest) if binding == "gpu" else fitting
    return Limit(_tokens(fitting), _tokens(lucky), binding, prediction)


def _tokens(steps: int) -> int | None:
    return steps * STEP_TOKENS if steps else None


def at_prompt(job: Job, prompt: int) -> Job:
    lengths = job.lengths
    return replace(job, lengths=Lengths(prompt, lengths.chosen, lengths.rejected, lengths.padded))


def _longest_fitting(
    job: Job, plan: Plan, allocated: Callable[[int], int], longest: int
) -> tuple[int, Binding, Prediction | None]:
    """The most steps of 8 tokens that fit, what binds beyond, and the prediction there.

    Full predictions bracket the answer; each says how many bytes there are beside allocated ones, and solving
    allocated bytes for the rest gives the next guess.
    """
    known: dict[int, Prediction] = {}
    low, high = 0, longest + 1  # low fits (or is 0), high does not (or is past the end)
    guess = _solve(allocated, int(job.cluster.gpu.capacity_bytes * 0.88), 0, longest + 1)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        width = high - low
        found = known[guess] = predict(at_prompt(job, guess * STEP_TOKENS), plan=plan)
        if found.verdict == "fits":
            low = guess
        else:
            high = guess
        retried = found.verdict == "tight" and found.gpu.high_bytes <= found.gpu.capacity_bytes
        other = found.gpu_verdict == "fits" and found.verdict != "fits"
        if retried or other or (len(known) > 3 and high - low > width // 2 > 2):
            # not the sum of bytes but fragmentation, host or disk binds, or the guesses creep: halve
            guess = (low + high) // 2
        else:
            beside = found.gpu.high_bytes / found.gpu.allocated_bytes
            guess = _solve(allocated, int(found.gpu.capacity_bytes / beside), low, high)
            guess += found.verdict == "fits"  # test the first that should fail, then the last that should fit
    if low == longest:
        return low, "none", known.get(low)
    blocker = known[high]
    verdicts: dict[Binding, Verdict | None] = {
        "gpu": blocker.gpu_verdict, "host": blocker.host_verdict, "disk": blocker.disk_verdict,
    }  # fmt: skip
    binding = next(name for name, verdict in verdicts.items() if verdict == blocker.verdict)
    return low, binding, known.get(low)


def _longest_not_oom(job: Job, allocated: Callable[[int], int], low: int, longest: int) -> int:
    """Where even the lowest figure of the interval passes the card."""
    room = job.cluster.gpu.capacity_bytes - overhead(job).low_bytes
    return _solve(allocated, int(room / (1 + residuals_for(job.cluster).allocated[0])), low, longest + 1)


def _solve(allocated: Callable[[int], int], target_bytes: int, low: int, high: int) -> int:
    """The most steps in [low, high) whose allocated bytes are within the target; allocated bytes grow with length.

    False position, since they grow almost as a straight line; halving when that stops helping.
    """
    below, above = low, high
    below_bytes, above_bytes = allocated(below), None
    if below_bytes > target_bytes:
        return low
    step = 1024
    for turn in range(40):
        if above - below <= 1:
            break
        if above_bytes is None:
            middle = min(below + step, above - 1)
        elif turn % 4 == 3:
            middle = (below + above) // 2
        else:
            share = (target_bytes - below_bytes) / (above_bytes - below_bytes)
            middle = below + int(share * (above - below))
        middle = min(max(middle, below + 1), above - 1)
        size_bytes = allocated(middle)
        if size_bytes <= target_bytes:
            below, below_bytes = middle, size_bytes
        else:
            above, above_bytes = middle, size_bytes
    return below


def allocated_by_steps(job: Job, plan: Plan) -> Callable[[int], int]:
    """Allocated peak at a prompt, from the steady step alone and the lasting bytes; remembered."""
    program = build_program(job, plan)
    before = Program(tuple(phase for phase in program.phases if phase.step <= 1))
    lasting = live_at_end(before.phases, "gpu")
    seen: dict[int, int] = {}

    def allocated(steps: int) -> int:
        if steps not in seen:
            step = steady_step(at_prompt(job, max(steps, 1) * STEP_TOKENS), plan)  # rows are never empty
            seen[steps] = lasting + highest(phase_peaks(step, GPU)).size_bytes
        return seen[steps]

    return allocated
