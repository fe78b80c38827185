"""What trials and the user's whole training cost: device-hours, and money where a device-hour has a price. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.contract.config import Frozen
from orchestrator.contract.facts import DataFacts
from orchestrator.contract.outcome import INTERRUPTED_KINDS, Rejected
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import ResourcesSection, TrainSection


@dataclass(frozen=True)
class Price:
    """What one device costs for an hour, in `currency`."""

    per_device_hour: float
    currency: str

    def of(self, device_s: float) -> float:
        """The cost of `device_s` device-seconds."""
        return self.per_device_hour * device_s / 3600


class TrainingCost(Frozen):
    """The user's whole training with one configuration, at its tokens/s and without evaluation and saving."""

    training_s: float
    device_hours: float
    money: float | None


class SweepCost(Frozen):
    """What a sweep has cost and what its winner saves. Sums of money are in `currency`, None without a price."""

    device_hours: float
    """Of all attempts that have ended, retries and confirmations too."""
    money: float | None
    currency: str | None
    not_launched_device_hours: float | None
    """Predicted: what candidates that were not launched would have taken, each as long as a trial in median."""
    planned_tokens: int | None
    """Length of the user's whole training; None: the spec does not say, and the four below are None too."""
    best: TrainingCost | None
    baseline: TrainingCost | None
    saved_device_hours: float | None
    """Of the whole training, by the winner against the baseline; negative where it is slower."""
    saved_money: float | None
    break_even_tokens: float | None
    """Tokens of training after which the winner has saved the device-hours of the sweep; None where it saves none."""


def price_of(resources: ResourcesSection) -> Price | None:
    """The spec's price; None where it states none."""
    price = resources.price_per_device_hour
    return Price(price, resources.currency) if price is not None else None


def planned_tokens(train: TrainSection, data: DataFacts) -> int | None:
    """Tokens without padding of the user's whole training; None where the spec does not plan it."""
    if train.planned_epochs is not None:
        return max(1, round(train.planned_epochs * data.tokens))
    return train.planned_tokens


def training_cost(
    tokens: int | None, tokens_per_second: float | None, world_size: int, price: Price | None
) -> TrainingCost | None:
    """A training over `tokens`; None where its length or its speed is not known."""
    if not tokens or not tokens_per_second:
        return None
    training_s = tokens / tokens_per_second
    device_s = training_s * world_size
    return TrainingCost(
        training_s=training_s, device_hours=device_s / 3600, money=price.of(device_s) if price is not None else None
    )


def used_device_s(records: Iterable[TrialRecord], now_s: float | None = None) -> float:
    """Device-seconds of all attempts; one that runs counts up to `now_s`, or not at all."""
    return sum(
        record.config.world_size * _duration_s(attempt, now_s) for record in records for attempt in record.attempts
    )


def median_trial_s(records: Iterable[TrialRecord]) -> float | None:
    """Seconds that a launched trial of the search took to its end, retries included; None before the first end."""
    durations_s = [each for record in records if (each := searched_s(record)) is not None]
    return median(durations_s) if durations_s else None


def searched_s(record: TrialRecord) -> float | None:
    """Seconds of the trial's search, retries included; None before its end and where it was never launched."""
    outcome = record.outcome
    if outcome is None or isinstance(outcome, Rejected) or outcome.kind in INTERRUPTED_KINDS:
        return None
    return sum(_duration_s(attempt, None) for attempt in record.searches)


def sweep_cost(
    records: Sequence[TrialRecord],
    best: TrialRecord | None,
    baseline: TrialRecord | None,
    price: Price | None,
    tokens: int | None,
) -> SweepCost:
    """The account of a sweep with the trials `records` for a training over `tokens`."""
    figures = reported(records)
    used_s = used_device_s(records)

    def device_s_per_token(record: TrialRecord | None) -> float | None:
        if record is None or record.trial not in figures:
            return None
        return record.config.world_size / figures[record.trial].tokens_per_second

    def cost(record: TrialRecord | None) -> TrainingCost | None:
        if record is None or record.trial not in figures:
            return None
        return training_cost(tokens, figures[record.trial].tokens_per_second, record.config.world_size, price)

    winner, before = device_s_per_token(best), device_s_per_token(baseline)
    saved_s = before - winner if before is not None and winner is not None else None
    saved_in_all_s = saved_s * tokens if saved_s is not None and tokens is not None else None
    return SweepCost(
        device_hours=used_s / 3600,
        money=price.of(used_s) if price is not None else None,
        currency=price.currency if price is not None else None,
        not_launched_device_hours=_not_launched_device_hours(records),
        planned_tokens=tokens,
        best=cost(best),
        baseline=cost(baseline),
        saved_device_hours=saved_in_all_s / 3600 if saved_in_all_s is not None else None,
        saved_money=price.of(saved_in_all_s) if saved_in_all_s is not None and price is not None else None,
        break_even_tokens=used_s / saved_s if saved_s is not None and saved_s > 0 else None,
    )


def _not_launched_device_hours(records: Sequence[TrialRecord]) -> float | None:
    rejected = [record for record in records if isinstance(record.outcome, Rejected)]
    trial_s = median_trial_s(records)
    if not rejected or trial_s is None:
        return None
    return sum(record.config.world_size for record in rejected) * trial_s / 3600


def _duration_s(attempt: AttemptRecord, now_s: float | None) -> float:
    end_s = attempt.ended_s if attempt.ended_s is not None else now_s
    return max(0.0, end_s - attempt.dispatched_s) if end_s is not None else 0.0
