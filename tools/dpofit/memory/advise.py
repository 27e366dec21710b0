"""The smallest changes that make a job fit, ranked by what they cost; each is predicted whole before it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from dpofit.errors import BadInput
from dpofit.memory.job import Job, Lengths
from dpofit.memory.levers import KINDS, Change, length_lever, levers, loss_lever, nodes_lever, pieces_lever
from dpofit.memory.limits import longest_prompt
from dpofit.memory.predict import Prediction, default_mix, fitting_prediction
from dpofit.memory.screen import Screen, screen
from dpofit.memory.speed import step_time
from dpofit.recipe.long_context import PIECES

Changes = tuple[Change, ...]
# The job with changes applied, as its owner would plan it; None when it would be refused.
Replan = Callable[[Changes], Job | None]
MOST_NODES = 64
# Levers that cost host memory: more of them is not always better, so every combination is tried.
HOST_GROUPS = ("sharding", "unsloth-gc")


def in_order(changes: Iterable[Change]) -> Changes:
    """The order in which changes are applied: where two set one key, the later wins."""
    return tuple(sorted(changes, key=lambda change: change.id))


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes that make the job fit, none of which can be left out. Times are estimates relative to the job's own:
    of one pair, and of one pair in GPU time (a larger cluster takes as much GPU time for a pair, in less time)."""

    changes: Changes
    prediction: Prediction
    relative_time: float
    relative_gpu_time: float

    @property
    def kind(self) -> str:
        return max((change.kind for change in self.changes), key=list(KINDS).index)


@dataclass(frozen=True, slots=True)
class Advice:
    """What makes `base` fit, best first; nothing when it fits already or nothing helps."""

    base: Prediction
    suggestions: tuple[Suggestion, ...]


@dataclass(slots=True)
class Workbench:
    """Tries changes on one job and remembers what came of them."""

    job: Job
    mix: tuple[Lengths, ...] | None  # None: unknown, predict's own assumption
    replan: Replan
    _jobs: dict[frozenset[Change], Job | None] = field(default_factory=dict)
    _screens: dict[frozenset[Change], Screen | None] = field(default_factory=dict)
    _predictions: dict[frozenset[Change], Prediction | None] = field(default_factory=dict)

    def changed(self, changes: Iterable[Change]) -> Job | None:
        """The job with `changes`; None when LLaMA-Factory would refuse it."""
        key = frozenset(changes)
        if key not in self._jobs:
            self._jobs[key] = self.replan(in_order(key)) if key else self.job
        return self._jobs[key]

    def screen(self, changes: Iterable[Change]) -> Screen | None:
        """The screen of the job with `changes`; None when it would be refused or is not modelled."""
        key = frozenset(changes)
        if key not in self._screens:
            job = self.changed(key)
            try:
                self._screens[key] = None if job is None else screen(job, self.mix or default_mix(job))
            except BadInput:
                self._screens[key] = None
        return self._screens[key]

    def fitting(self, changes: Iterable[Change]) -> Prediction | None:
        """The whole prediction with `changes` when its verdict is `fits`."""
        key = frozenset(changes)
        screened, job = self.screen(key), self.changed(key)
        if job is None or screened is None or not screened.may_fit:
            return None
        if key not in self._predictions:
            self._predictions[key] = fitting_prediction(job, self.mix, screened.plan)
        return self._predictions[key]


def advise(bench: Workbench, base: Prediction, most: int = 6) -> Advice:
    """Search one kind of change after the other, from those that leave the training as it is to another method, until
    there are `most`; of each kind without long-context pieces first, then by GPU time, number of changes, host memory.
    None contains another.

    `base` is the prediction of bench.job.
    """
    if base.verdict == "fits":
        return Advice(base, ())
    found: list[Changes] = []
    suggestions: list[Suggestion] = []
    for new in _searches(bench, base):
        new = [_fewest_pieces(bench, changes) for changes in new]
        new = [changes for changes in _without_supersets([*found, *new]) if changes not in found]
        found += new
        suggestions += sorted((suggestion(bench, changes) for changes in new), key=_cost)
        if len(found) >= most:
            break
    return Advice(base, tuple(suggestions[:most]))


def _searches(bench: Workbench, base: Prediction) -> Iterator[list[Changes]]:
    """What fits, by one kind of change after the other; combinations only while nothing fits yet."""
    pulled = levers(base)
    same = [lever for lever in pulled if lever.kind == "same"]
    found = _smallest(bench, same) or [changes for changes in _strongest(bench, same, ()) if changes]
    yield found
    larger = _larger_cluster(bench, [] if found else same)
    yield larger
    enough = bool(found or larger)
    for lever in pulled:
        if lever.kind == "trains":
            trained = _with(bench, lever, same, alone=enough)
            enough = enough or bool(trained)
            yield trained
    yield _shorter(bench)
    orpo = loss_lever(bench.job)
    yield [] if orpo is None else _with(bench, orpo, same, alone=enough)


def _fewest_pieces(bench: Workbench, changes: Changes) -> Changes:
    """Long-context pieces among fitting changes made as few as still fit; of as many, those that cost least."""
    lever = next((change for change in changes if change.long_context), None)
    if lever is None:
        return changes
    others = tuple(change for change in changes if change is not lever)
    own = bench.job.recipe.long_context
    more = [piece for piece in lever.long_context if piece not in own]
    for count in range(1, len(more)):
        chosen = ({*own, *pieces} for pieces in combinations(more, count))
        fewer = [(*others, pieces_lever(bench.job, [p for p in PIECES if p in pieces])) for pieces in chosen]
        if fitting := [one for one in fewer if bench.fitting(one)]:
            return min(fitting, key=lambda one: _cost(suggestion(bench, one)))
    return changes


def suggestion(bench: Workbench, changes: Changes) -> Suggestion:
    """What fitting `changes` do and cost."""
    prediction = bench.fitting(changes)
    assert prediction is not None
    before, after = step_time(bench.job), step_time(prediction.job)
    time = after.seconds_per_pair / before.seconds_per_pair
    return Suggestion(changes, prediction, time, time * prediction.job.world_size / bench.job.world_size)


def _cost(found: Suggestion) -> tuple[bool, float, int, int]:
    """What LLaMA-Factory can do alone comes before pieces that only `dpofit launch` installs."""
    ours = any(change.long_context for change in found.changes)
    return ours, round(found.relative_gpu_time, 2), len(found.changes), found.prediction.host.peak_bytes


def _smallest(bench: Workbench, same: Sequence[Change]) -> list[Changes]:
    """Single changes that are enough, else pairs of those that help."""
    singles: list[Changes] = [(lever,) for lever in same if bench.fitting([lever])]
    helpful = [lever for lever in same if (lever,) not in singles and helps(bench, lever)]
    pairs: list[Changes] = [
        pair for pair in combinations(helpful, 2) if pair[0].group != pair[1].group and bench.fitting(pair)
    ]
    return singles + pairs


def helps(bench: Workbench, lever: Change) -> bool:
    """Does the lever take 1% or more off a space that is short?"""
    before, after = bench.screen(()), bench.screen([lever])
    if before is None or after is None:
        return False
    if lever.expandable:
        return True  # changes what is reserved, not what is allocated
    cluster = bench.job.cluster
    host_short = cluster.host_ram_bytes is not None and before.host.high_bytes > cluster.host_ram_bytes
    disk_short = cluster.disk_bytes is not None and before.disk_bytes > cluster.disk_bytes
    return (
        after.allocated_bytes < 0.99 * before.allocated_bytes
        or (host_short and after.host.high_bytes < 0.99 * before.host.high_bytes)
        or (disk_short and after.disk_bytes < 0.99 * before.disk_bytes)
    )


def _strongest(bench: Workbench, same: Sequence[Change], given: Changes) -> list[Changes]:
    """Everything at once, with every choice of the levers that cost host memory, then without what is not needed."""
    taken = {change.group for change in given}
    groups: dict[str, list[Change]] = {}
    for lever in same:
        if lever.group not in taken:
            groups.setdefault(lever.group, []).append(lever)
    always = [choices[0] for group, choices in groups.items() if group not in HOST_GROUPS]
    choices: list[list[Change | None]] = [[None, *groups[group]] for group in HOST_GROUPS if group in groups]
    most = bench.screen((*given, *(group[-1] for group in choices if group[-1] is not None), *always))
    if most is not None and most.least_high_bytes > bench.job.cluster.gpu.capacity_bytes:
        return []  # levers.py lists the strongest last: what does not fit the card with them does not without
    found: dict[bool, Changes] = {}
    for chosen in product(*choices):
        offloads_checkpoints = any(change is not None and change.group == "unsloth-gc" for change in chosen)
        changes = (*given, *(change for change in chosen if change is not None), *always)
        if offloads_checkpoints not in found and bench.fitting(changes):  # the least sharding and offload that does
            found[offloads_checkpoints] = _pruned(bench, changes, given)
    return list(dict.fromkeys(found.values()))


def _pruned(bench: Workbench, changes: Changes, kept: Changes) -> Changes:
    """`changes` without those it still fits without; the ones that cost most time are tried first."""
    seconds = {}
    for change in changes:
        alone = bench.changed([change])
        seconds[change] = step_time(alone).seconds_per_pair if alone is not None else 0.0
    for change in sorted(changes, key=lambda change: -seconds[change]):
        fewer = tuple(other for other in changes if other is not change)
        if change not in kept and bench.fitting(fewer):
            changes = fewer
    return changes


def _with(bench: Workbench, lever: Change, same: Sequence[Change], alone: bool) -> list[Changes]:
    """The lever by itself when that is enough, else with others."""
    if bench.fitting([lever]):
        return [(lever,)]
    return [] if alone or bench.changed([lever]) is None else _strongest(bench, same, (lever,))


def _larger_cluster(bench: Workbench, same: Sequence[Change]) -> list[Changes]:
    """The fewest nodes (of one node: the fewest of its cards first), alone or with everything in `same`."""
    cluster = bench.job.cluster
    sizes = [(1, gpus) for gpus in (2, 4, 8) if cluster.nodes == 1 and gpus > cluster.gpus_per_node]
    per_node = max(cluster.gpus_per_node, sizes[-1][1] if sizes else 0)
    sizes += [(nodes, per_node) for nodes in _doublings(cluster.nodes)]
    if not bench.fitting([nodes_lever(*sizes[-1])]):
        for size in sizes[:3] if same else ():
            if found := _strongest(bench, same, (nodes_lever(*size),)):
                return found
        return []
    first = next(size for size in sizes if bench.fitting([nodes_lever(*size)]))
    low = max([nodes for nodes, gpus in sizes if (nodes, gpus) < first and gpus == per_node], default=cluster.nodes)
    high = first[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bench.fitting([nodes_lever(middle, per_node)]) else (middle, high)
    return [(nodes_lever(high, first[1]),)]


def _doublings(nodes: int) -> list[int]:
    found = [2 * nodes]
    while found[-1] < MOST_NODES:
        found.append(2 * found[-1])
    return found


def _shorter(bench: Workbench) -> list[Changes]:
    prompt = longest_prompt(bench.job).prompt_tokens
    if prompt is None or prompt >= bench.job.lengths.prompt:
        return []
    cut = (length_lever(bench.job, prompt),)
    return [cut] if bench.fitting(cut) else []


def _without_supersets(found: Sequence[Changes]) -> list[Changes]:
    unique = list(dict.fromkeys(in_order(changes) for changes in found))
    return [one for one in unique if not any(set(other) < set(one) for other in unique)]
