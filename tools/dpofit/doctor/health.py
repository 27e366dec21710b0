"""What the logged numbers say about a run that may not have crashed: stuck, NaN, no gradient, both rewards falling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from dpofit.doctor.facts import Event, LogFacts, Metrics

LN_2 = 0.6931  # DPO's loss when policy and reference agree, as trainers print it (4 decimals)
# The first record of a healthy run is ln 2 with margins of zero, and while the learning rate warms up from nothing a
# few more may print so.
FEWEST_RECORDS = 10
FEWEST_FOR_TREND = 20


def loss_stuck(records: Sequence[Metrics], facts: LogFacts) -> Event | None:
    """Every record at ln 2 with margins of exactly zero: the policy never left the reference."""
    preference = [record for record in records if record.margin is not None and record.loss is not None]
    at_start = [record for record in preference if record.margin == 0 and abs((record.loss or 0) - LN_2) < 1e-4]
    if len(preference) < FEWEST_RECORDS or len(at_start) < len(preference):
        return None
    return Event("data.loss-stuck", preference[0].place, {"records": f"{len(preference):,}"})


def loss_at_start(records: Sequence[Metrics], facts: LogFacts) -> Event | None:
    """A log of nothing but one to four such records: normal in step 1, a fault later; it can't be told which."""
    if len(records) >= FEWEST_RECORDS or facts.progress or facts.done or facts.launches or facts.lines > 20:
        return None
    whole = [record for record in records if record.margin == 0 and abs((record.loss or 0) - LN_2) < 1e-4]
    if not whole or len(whole) < len(records):
        return None
    return Event("data.loss-at-start", whole[0].place, {})


def loss_nan(records: Sequence[Metrics], facts: LogFacts) -> Event | None:
    """The first record whose loss or gradient norm is not a number; transformers logs such a loss as 0 by default."""
    for record in records:
        loss_gone = record.loss is not None and not math.isfinite(record.loss)
        gradient_gone = record.grad_norm is not None and not math.isfinite(record.grad_norm)
        if loss_gone or (gradient_gone and record.loss == 0):
            return Event("data.loss-nan", record.place, {})
    return None


def no_gradient(records: Sequence[Metrics], facts: LogFacts) -> Event | None:
    """A gradient norm of exactly zero in every record."""
    norms = [record for record in records if record.grad_norm is not None]
    if len(norms) < FEWEST_RECORDS or any(record.grad_norm != 0 for record in norms):
        return None
    return Event("config.no-gradient", norms[0].place, {"records": f"{len(norms):,}"})


def rewards_fall(records: Sequence[Metrics], facts: LogFacts) -> Event | None:
    """Both rewards fall quarter by quarter, by more than twice the noise of the first quarter, to below zero."""
    both = [(r.chosen, r.rejected) for r in records if r.chosen is not None and r.rejected is not None]
    if len(both) < FEWEST_FOR_TREND or not all(math.isfinite(value) for pair in both for value in pair):
        return None
    for side in zip(*both, strict=True):
        quarter = len(side) // 4
        quarters = [side[start * quarter : (start + 1) * quarter] for start in range(4)]
        means = [fmean(each) for each in quarters]
        falls = all(later < earlier for earlier, later in pairwise(means))
        if not falls or means[-1] >= 0 or means[0] - means[-1] <= 2 * pstdev(quarters[0]):
            return None
    last = records[-1]
    return Event("data.rewards-fall", last.place, {"chosen": f"{last.chosen:g}", "rejected": f"{last.rejected:g}"})


HealthCheck = Callable[[Sequence[Metrics], LogFacts], Event | None]
HEALTH_CHECKS: dict[str, HealthCheck] = {
    check.__name__: check for check in (loss_stuck, loss_at_start, loss_nan, no_gradient, rewards_fall)
}
