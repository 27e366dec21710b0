"""The longest prompt that fits: solved on allocated bytes and what the allocator reserves beside them."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dpofit.memory.disk import disk_use
from dpofit.memory.host import host_peak
from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import highest, live_at_end, phase_peaks
from dpofit.memory.overhead import overhead
from dpofit.memory.predict import (
    GPU,
    default_mix,
    expandable_segments,
    high_bytes,
    predict,
    residuals_for,
    row_tokens,
    shorter_steps,
    verdicts_beside,
    wanted,
)
from dpofit.memory.scope import check_scope
from dpofit.memory.step import Plan, build_program, plan_steps, steady_step

Binding = Literal["gpu", "host", "disk", "none"]
STEP_TOKENS = 8  # rows are padded to a multiple of it
SEARCHED_TOKENS = 2**22  # with rope_scaling the model's positions follow cutoff_len; no card takes as many
FIRST_GUESS = {True: 0.85, False: 0.55}  # of the card in allocated bytes, with segments that grow and without
NEAR = 0.02  # of the length: within it, what is beside allocated bytes changes by jumps alone
FIRST_STRIDE = 1024  # steps, until some length is too long


@dataclass(frozen=True, slots=True)
class Limit:
    """Longest prompt in tokens at which the verdict is `fits`, and at which it is not yet `oom`; None: not even 8."""

    prompt_tokens: int | None
    not_oom_prompt_tokens: int | None
    binding: Binding  # what stops the next 8 tokens; none: the model's positions do


def longest_prompt(job: Job) -> Limit:
    """Search prompts in steps of 8 with the job's answers kept; the mix of shorter batches scales with the prompt."""
    check_scope(job.recipe, job.model, job.world_size)
    plan = plan_steps(job)
    answer = max(job.lengths.chosen, job.lengths.rejected)
    positions = SEARCHED_TOKENS if job.recipe.rope_scaling else job.model.max_positions
    longest = max((positions - answer) // STEP_TOKENS, 0)  # an answer may leave no position
    allocated = AllocatedBySteps(job, plan)
    fitting, binding = _longest_fitting(job, plan, allocated, longest)
    lucky = _longest_not_oom(job, allocated, fitting, longest) if binding == "gpu" else fitting
    return Limit(_tokens(fitting), _tokens(lucky), binding)


def _tokens(steps: int) -> int | None:
    return steps * STEP_TOKENS if steps else None


def at_prompt(job: Job, prompt: int) -> Job:
    lengths = job.lengths
    return replace(job, lengths=Lengths(prompt, lengths.chosen, lengths.rejected, lengths.padded))


class _Tried(NamedTuple):
    """One prompt: whether predict's verdict is `fits`, and what it would need for that of the card, over what the card
    has and over allocated bytes; None: host or disk say no."""

    fits: bool
    of_card: float | None
    of_allocated: float | None


def _try(job: Job, plan: Plan) -> _Tried:
    """As `predict` decides, without what it finds out besides."""
    mix, program = default_mix(job), build_program(job, plan)
    others = verdicts_beside(job, host_peak(job, program, row_tokens(mix)), disk_use(job))
    if not {*others} <= {None, "fits"}:
        return _Tried(False, None, None)
    needed = high_bytes(job, wanted(job, program, shorter_steps(job, plan, mix)))
    of_card = needed / job.cluster.gpu.capacity_bytes
    return _Tried(of_card <= 1, of_card, needed / highest(phase_peaks(program, GPU)).size_bytes)


def _longest_fitting(job: Job, plan: Plan, allocated: AllocatedBySteps, longest: int) -> tuple[int, Binding]:
    """The most steps of 8 tokens that fit, and what binds beyond.

    What is reserved beside allocated bytes jumps up and down a little from length to length: near the card's end there
    are lengths that fit beyond some that do not, and the longest is looked for, from where even the fewest bytes beside
    are too many.
    """
    capacity = job.cluster.gpu.capacity_bytes
    low, high = 0, longest + 1  # low fits (or is 0), high does not (or is past the end)
    tried: dict[int, _Tried] = {}
    guess = allocated.about(int(capacity * FIRST_GUESS[expandable_segments(job)]), 0, high)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        found = tried[guess] = _try(at_prompt(job, guess * STEP_TOKENS), plan)
        low, high = (guess, high) if found.fits else (low, guess)
        guess = _next_guess(tried, allocated, capacity, low, high)
    if low == longest:
        return low, "none"
    others_bind = high in tried and tried[high].of_card is None
    return low, _binding(at_prompt(job, high * STEP_TOKENS), plan) if others_bind else "gpu"


def _next_guess(tried: dict[int, _Tried], allocated: AllocatedBySteps, capacity: int, low: int, high: int) -> int:
    """Solve allocated bytes for what the last try left of the card; between one that fits and one that does not, false
    position; near the end, from above. Where that stops helping (host or disk bind, one side does not move) halve."""
    last = [*tried.values()][-1]
    same_side = next((n for n, one in enumerate(reversed(tried.values())) if one.fits is not last.fits), len(tried))
    below, above = tried.get(low), tried.get(high)
    if last.of_card is None or last.of_allocated is None or same_side > 4:
        return (low + high) // 2
    if below is None or above is None or below.of_card is None or above.of_card is None:
        guess = allocated.about(int(capacity / last.of_allocated), low, high)
        return guess + last.fits  # the first that should fail, then the last that should fit
    if high - low > NEAR * low:
        if same_side > 1:
            return (low + high) // 2
        return low + round((high - low) * (1 - below.of_card) / (above.of_card - below.of_card))
    least = min(one.of_allocated for steps, one in tried.items() if one.of_allocated and steps > low * (1 - NEAR))
    return allocated.about(int(capacity / least), low, high)


def _binding(job: Job, plan: Plan) -> Binding:
    """What keeps a job from fitting when it is not the card alone."""
    found = predict(job, plan=plan)
    verdicts: tuple[tuple[Binding, str | None], ...] = (
        ("gpu", found.gpu_verdict), ("host", found.host_verdict), ("disk", found.disk_verdict),
    )  # fmt: skip
    return next(name for name, verdict in verdicts if verdict == found.verdict)


def _longest_not_oom(job: Job, allocated: AllocatedBySteps, low: int, longest: int) -> int:
    """Where even the lowest figure of the interval passes the card."""
    room = job.cluster.gpu.capacity_bytes - overhead(job).low_bytes
    return allocated.most_within(int(room / (1 + residuals_for(job.cluster).allocated[0])), low, longest + 1)


class AllocatedBySteps:
    """Allocated peak at a prompt, remembered: from the steady step alone and the lasting bytes, unless the run
    evaluates, which may need more."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job, self._plan = job, plan
        before = tuple(phase for phase in build_program(job, plan).phases if phase.step <= 1)
        self._lasting = live_at_end(before, "gpu")
        self._seen: dict[int, int] = {}
        self._steps: list[int] = []  # of `_seen`, in order

    def __call__(self, steps: int) -> int:
        if steps not in self._seen:
            job = at_prompt(self._job, max(steps, 1) * STEP_TOKENS)  # rows are never empty
            if job.recipe.evaluates:
                peak = highest(phase_peaks(build_program(job, self._plan), GPU)).size_bytes
            else:
                peak = self._lasting + highest(phase_peaks(steady_step(job, self._plan), GPU)).size_bytes
            self._seen[steps] = peak
            insort(self._steps, steps)
        return self._seen[steps]

    def about(self, target_bytes: int, low: int, high: int) -> int:
        """Nearly the most steps in [low, high) that take no more than the target, for a next guess."""
        return self.most_within(target_bytes, low, high, exact=False)

    def most_within(self, target_bytes: int, low: int, high: int, exact: bool = True) -> int:
        """The most steps in [low, high) that take no more than the target; allocated bytes grow with length.

        False position between the nearest lengths tried, since they grow almost as a straight line; halving when that
        stops helping.
        """
        if self(low) > target_bytes:
            return low
        below = low
        above, above_bytes = high, None
        for steps in self._steps:
            if low < steps < high:
                if self._seen[steps] <= target_bytes:
                    below = steps
                else:
                    above, above_bytes = steps, self._seen[steps]
                    break
        turn = 0
        while above - below > 1:
            turn += 1
            of_a_step = None
            if above_bytes is None:
                middle = min(below + FIRST_STRIDE, above - 1)
            elif turn % 4 == 0:
                middle = (below + above) // 2
            else:
                of_a_step = (above_bytes - self(below)) / (above - below)
                middle = below + int((target_bytes - self(below)) / of_a_step) if of_a_step else below
            middle = min(max(middle, below + 1), above - 1)
            size_bytes = self(middle)
            if size_bytes <= target_bytes:
                below = middle
            else:
                above, above_bytes = middle, size_bytes
            if not exact and of_a_step and abs(size_bytes - target_bytes) <= of_a_step:
                break
        return below
