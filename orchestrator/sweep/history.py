"""All trials of a sweep, with what is asked of them at every turn kept up to date: no answer looks at all of them."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from statistics import median

from orchestrator.contract.outcome import Ok, Rejected
from orchestrator.contract.record import TrialRecord
from orchestrator.search.cost import searched_s, used_device_s
from orchestrator.search.quality import eval_loss, loss_limit
from orchestrator.search.reported import thrashes

RIVALS = 16
"""So many of the fastest are kept in view, and as many whose intervals reach the best's: more than are ever measured
again, also after some have failed."""


class History:
    """The trials by number. `put` replaces the record of a trial that is known.

    `eval_loss_within`: see `orchestrator.search.quality.loss_limit`. `confirmed`: how many of the best are to be
    measured again.
    """

    def __init__(
        self, records: Iterable[TrialRecord] = (), eval_loss_within: float | None = None, confirmed: int = 0
    ) -> None:
        self._within = eval_loss_within
        self._rivals = max(RIVALS, 2 * confirmed)
        self._records: dict[int, TrialRecord] = {}
        self._rejected: set[int] = set()
        self._last_launched = -1
        self._last = -1
        self._ended_device_s = 0.0
        self._open: set[int] = set()
        self._widest = 1
        self._durations_s: list[float] = []
        self._baselines: set[int] = set()
        self._confirmed: set[int] = set()
        self._lists = (_BySpeed(), _BySpeed())
        for record in records:
            self.put(record)

    def __getitem__(self, trial: int) -> TrialRecord:
        return self._records[trial]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TrialRecord]:
        """In the order of their numbers."""
        return (self._records[trial] for trial in sorted(self._records))

    def put(self, record: TrialRecord) -> None:
        """Take in a trial as it is now."""
        old = self._records.get(record.trial)
        if old is not None:
            self._account(old, -1)
        self._records[record.trial] = record
        self._account(record, 1)
        if record.is_baseline and (old is None or eval_loss(old) != eval_loss(record)) and self._within is not None:
            self._sort_again()

    @property
    def next_number(self) -> int:
        """Of a trial that is yet to come."""
        return self._last + 1

    @property
    def rejected(self) -> int:
        """How many were never launched."""
        return len(self._rejected)

    @property
    def launched(self) -> int:
        """How many were."""
        return len(self._records) - len(self._rejected)

    @property
    def median_trial_s(self) -> float | None:
        """See `orchestrator.search.cost.median_trial_s`."""
        return median(self._durations_s) if self._durations_s else None

    @property
    def widest(self) -> int:
        """The most devices that a trial takes; 1 without any."""
        return self._widest

    def used_device_s(self, now_s: float) -> float:
        """See `orchestrator.search.cost.used_device_s`."""
        running = [self._records[trial] for trial in self._open]
        return self._ended_device_s + used_device_s(running, now_s) - used_device_s(running)

    def in_view(self) -> list[TrialRecord]:
        """The trials from which the best can be told as from all: the fastest, what cannot be told from them, the
        baseline, all that were confirmed, and the last one launched. In the order of their numbers."""
        numbers = self._baselines | self._confirmed
        numbers |= {self._last_launched} if self._last_launched >= 0 else set()
        for each in self._lists:
            numbers |= each.fastest(self._rivals, self._least_of_best())
        return [self._records[trial] for trial in sorted(numbers)]

    def _least_of_best(self) -> float:
        """Lower end of the interval of the fastest, of those that do not thrash if there are any."""
        found = next((each.first for each in self._lists if each.first is not None), None)
        measurement = self._records[found].measurement if found is not None else None
        return measurement.tokens_per_second_low if measurement is not None else 0.0

    def _account(self, record: TrialRecord, sign: int) -> None:
        """Count `record` in (1) or out (-1)."""
        _member(self._rejected, record.trial, isinstance(record.outcome, Rejected) and sign > 0)
        _member(self._open, record.trial, record.running is not None and sign > 0)
        _member(self._baselines, record.trial, record.is_baseline and sign > 0)
        _member(self._confirmed, record.trial, bool(record.confirmations) and sign > 0)
        if not isinstance(record.outcome, Rejected):
            self._last_launched = max(self._last_launched, record.trial)
        self._last = max(self._last, record.trial)
        self._widest = max(self._widest, record.config.world_size)
        self._ended_device_s += sign * used_device_s([record])
        duration_s = searched_s(record)
        if duration_s is not None and sign > 0:
            insort(self._durations_s, duration_s)
        elif duration_s is not None:
            del self._durations_s[bisect_left(self._durations_s, duration_s)]
        self._place(record, sign)

    def _place(self, record: TrialRecord, sign: int) -> None:
        if not isinstance(record.standing, Ok) or record.measurement is None or self._is_lossy(record):
            return
        searched = record.model_copy(update={"attempts": record.searches})
        chosen = self._lists[1 if thrashes(searched) else 0]
        measured = record.measurement
        change = chosen.add if sign > 0 else chosen.remove
        change(record.trial, measured.tokens_per_second, measured.tokens_per_second_high)

    def _is_lossy(self, record: TrialRecord) -> bool:
        limit = loss_limit(self._within, [self._records[trial] for trial in self._baselines])
        return limit is not None and not limit.allows(record)

    def _sort_again(self) -> None:
        """The baseline's loss says anew who may win."""
        self._lists = (_BySpeed(), _BySpeed())
        for record in self._records.values():
            self._place(record, 1)


class _BySpeed:
    """Trials in the order of their tokens/s, and in that of the upper ends of their intervals."""

    def __init__(self) -> None:
        self._speeds: list[tuple[float, int]] = []
        self._highs: list[tuple[float, int]] = []
        self._high_of: dict[int, float] = {}

    @property
    def first(self) -> int | None:
        """The fastest; of equals the one with the lowest number."""
        return self._speeds[0][1] if self._speeds else None

    def add(self, trial: int, speed: float, high: float) -> None:
        insort(self._speeds, (-speed, trial))
        insort(self._highs, (-high, trial))
        self._high_of[trial] = high

    def remove(self, trial: int, speed: float, high: float) -> None:
        if self._high_of.pop(trial, None) is not None:
            del self._speeds[bisect_left(self._speeds, (-speed, trial))]
            del self._highs[bisect_left(self._highs, (-high, trial))]

    def fastest(self, count: int, least: float) -> set[int]:
        """The `count` fastest, and the `count` fastest of those whose upper end is at `least` or above."""
        found = {trial for _, trial in islice(self._speeds, count)}
        reaching = bisect_right(self._highs, (-least, inf))
        if reaching <= count:
            return found | {trial for _, trial in islice(self._highs, reaching)}
        able = (trial for _, trial in self._speeds if self._high_of[trial] >= least)
        return found | set(islice(able, count))


def _member(of: set[int], trial: int, is_in: bool) -> None:
    if is_in:
        of.add(trial)
    else:
        of.discard(trial)
