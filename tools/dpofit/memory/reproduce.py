"""Which clusters could have produced documented prompt limits whose hardware and unit nobody wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dpofit.hardware.cluster import Cluster, Gpu
from dpofit.memory.host import host_peak
from dpofit.memory.job import Job, Lengths
from dpofit.memory.meter import highest, phase_peaks
from dpofit.memory.overhead import overhead
from dpofit.memory.predict import GPU, fitting_prediction, residuals
from dpofit.memory.step import Plan, build_program, plan_steps

# could: the limit could be this cluster's. too-long: it would not run there. room-left: certainly more would run too.
Outcome = Literal["could", "too-long", "room-left"]
GPUS_PER_NODE = 8
SIZES = (8, 16, 32, 64, 96, 128, 192, 256)  # GPUs
# The notes' own steps: 8k → 10k → 12.5k. A preset that also carried a quarter more would have been noted with it.
NOTICEABLY_MORE = 1.25


@dataclass(frozen=True, slots=True)
class Unit:
    """What a limit's k counts. As a rule of thumb a token of Qwen's is 3-4 characters of English, 1.5-1.8 of Chinese
    (QwenLM/Qwen3 7a2f61f docs/source/getting_started/concepts.md:52); the middle of each."""

    name: Literal["tokens", "characters"]
    language: str
    characters_per_token: float

    def tokens(self, count: int) -> int:
        """Tokens of `count` of this unit, in the steps of 8 that rows are padded to."""
        return max(round(count / self.characters_per_token / 8) * 8, 8)


UNITS = (Unit("tokens", "", 1.0), Unit("characters", "Chinese", 1.65), Unit("characters", "English", 3.5))


@dataclass(frozen=True, slots=True)
class DocumentedLimit:
    """One limit: the job as it was run (any cluster), its prompt and answers in units, and whether the source says that
    longer should work."""

    recipe: str
    finetuning: str
    job: Job
    prompt: int
    response: int
    open_ended: bool


@dataclass(frozen=True, slots=True)
class LimitOutcome:
    """What one limit says of one cluster: bytes allocated on a GPU, with overhead the share of the card that they take,
    and host bytes of a node, all at the limit."""

    recipe: str
    outcome: Outcome
    open_ended: bool
    allocated_bytes: int
    card_share: float
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What each limit says of one cluster, in the order of the limits."""

    gpu: Gpu
    gpus: int
    finetuning: str
    unit: Unit
    outcomes: tuple[LimitOutcome, ...]

    @property
    def fits(self) -> tuple[str, ...]:
        """Recipes whose limit could be this cluster's."""
        return tuple(found.recipe for found in self.outcomes if found.outcome == "could")

    @property
    def all_at_once(self) -> bool:
        return len(self.fits) == len(self.outcomes)

    @property
    def fullness(self) -> float:
        """How full the card is at the limits that stand for a wall: of the emptiest, the share taken."""
        return min((found.card_share for found in self.outcomes if not found.open_ended), default=0.0)

    @property
    def host_bytes(self) -> int:
        """The most a node needs at any of the limits."""
        return max(found.host_bytes for found in self.outcomes)


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a job takes at one length, whatever the card's capacity."""

    allocated_bytes: int
    host_bytes: int


@dataclass(slots=True)
class _Ladder:
    """One limit over cluster sizes: plans are the same at every length and on every card, so they are kept."""

    limit: DocumentedLimit
    _plans: dict[int, Plan] = field(default_factory=dict)
    _needs: dict[tuple[int, Lengths], _Needs] = field(default_factory=dict)

    def job(self, gpu: Gpu, gpus: int, unit: Unit, more: bool) -> Job:
        response = unit.tokens(self.limit.response)
        prompt = unit.tokens(round(self.limit.prompt * (NOTICEABLY_MORE if more else 1)))
        lengths = Lengths(prompt, response, response, self.limit.job.lengths.padded)
        return replace(self.limit.job, cluster=Cluster(gpu, gpus // GPUS_PER_NODE, GPUS_PER_NODE), lengths=lengths)

    def plan(self, job: Job) -> Plan:
        if job.world_size not in self._plans:
            self._plans[job.world_size] = plan_steps(job)
        return self._plans[job.world_size]

    def needs(self, job: Job) -> _Needs:
        key = job.world_size, job.lengths
        if key not in self._needs:
            program = build_program(job, self.plan(job))
            host = host_peak(job, program, ()).peak_bytes
            self._needs[key] = _Needs(highest(phase_peaks(program, GPU)).size_bytes, host)
        return self._needs[key]

    def runs(self, gpu: Gpu, gpus: int, unit: Unit) -> bool:
        """Not `oom`: predict's low figure is within the card."""
        job = self.job(gpu, gpus, unit, more=False)
        allocated = self.needs(job).allocated_bytes
        return overhead(job).low_bytes + int(allocated * (1 + residuals().allocated[0])) <= gpu.capacity_bytes

    def certainly_runs_longer(self, gpu: Gpu, gpus: int, unit: Unit) -> bool:
        """`fits` at NOTICEABLY_MORE: predict's high figure is within the card. The replay only where it can decide:
        reserved bytes are never fewer than allocated ones."""
        job = self.job(gpu, gpus, unit, more=True)
        least = overhead(job).high_bytes + int(self.needs(job).allocated_bytes * (1 + residuals().reserved[1]))
        return least <= gpu.capacity_bytes and fitting_prediction(job, plan=self.plan(job)) is not None


def reproduce(limits: Sequence[DocumentedLimit], gpus: Sequence[Gpu]) -> list[Reproduction]:
    """Try every limit on every cluster of SIZES x `gpus`, with each of its fine-tuning methods and each unit.

    A limit could be a cluster's when the job is not `oom` there at the limit, and a prompt noticeably longer is not
    certain to fit (`fits`) unless the source itself says so. Host memory is not bounded: the notes do not name it.
    """
    ladders = [_Ladder(limit) for limit in limits]
    found = []
    for finetuning in dict.fromkeys(limit.finetuning for limit in limits):
        own = [ladder for ladder in ladders if ladder.limit.finetuning == finetuning]
        for unit in UNITS:
            for gpu in gpus:
                roomy = {ladder.limit.recipe: _first_with_room(ladder, gpu, unit) for ladder in own}
                found += [_at_size(own, gpu, size, unit, roomy) for size in SIZES]
    return found


def _first_with_room(ladder: _Ladder, gpu: Gpu, unit: Unit) -> int:
    """The first index of SIZES at which more would certainly run: a GPU's share only shrinks as GPUs are added."""
    if ladder.limit.open_ended:
        return len(SIZES)
    low, high = 0, len(SIZES)
    while low < high:
        middle = (low + high) // 2
        if ladder.certainly_runs_longer(gpu, SIZES[middle], unit):
            high = middle
        else:
            low = middle + 1
    return low


def _at_size(ladders: Sequence[_Ladder], gpu: Gpu, size: int, unit: Unit, roomy: dict[str, int]) -> Reproduction:
    outcomes = []
    for ladder in ladders:
        outcome: Outcome = "could"
        if not ladder.runs(gpu, size, unit):
            outcome = "too-long"
        elif SIZES.index(size) >= roomy[ladder.limit.recipe]:
            outcome = "room-left"
        job, limit = ladder.job(gpu, size, unit, more=False), ladder.limit
        needs = ladder.needs(job)
        share = (overhead(job).total_bytes + needs.allocated_bytes) / gpu.capacity_bytes
        outcomes.append(
            LimitOutcome(limit.recipe, outcome, limit.open_ended, needs.allocated_bytes, share, needs.host_bytes)
        )
    return Reproduction(gpu, size, ladders[0].limit.finetuning, unit, tuple(outcomes))
