"""Keeps candidates from being launched that are predicted not to fit."""

from orchestrator.contract.outcome import Rejected
from orchestrator.contract.record import TrialRecord
from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.placement.tracing import Untraceable
from orchestrator.space.candidates import Candidate, Space

SURELY = 0.999
"""Of not fitting: so sure that a replay of the allocator would not change it, nor a few trials."""
NEAREST = 20
"""So many of those that surely do not fit stay, to be judged and recorded one by one: reports show what is closest."""


class ForecastGate:
    """Rejects above `reject_probability` of not fitting. What trials of the sweep needed corrects the predictions."""

    def __init__(self, forecaster: Forecaster, reject_probability: float) -> None:
        self._forecaster = forecaster
        self._reject_probability = reject_probability

    def judge(self, candidate: Candidate) -> Rejected | None:
        """Why `candidate` is not launched. The baseline always is, and so is what cannot be traced."""
        if candidate.is_baseline:
            return None
        try:
            forecast = self._forecaster.forecast(candidate.config)
        except Untraceable:
            return None
        return rejection(forecast, self._reject_probability)

    def learn(self, record: TrialRecord) -> None:
        """Take a trial that is over into account."""
        self._forecaster.learn(record)


def without_hopeless(space: Space, forecaster: Forecaster, reject_probability: float) -> Space:
    """`space` without the candidates that surely do not fit; why is what they would need most of, and when.

    Thousands of them would each cost a proposal and a record. The baseline stays, and so do those that are nearest to
    fitting. `forecaster` is prepared for all candidates.
    """
    bound = max(reject_probability, SURELY)
    hopeless: list[tuple[int, str, str]] = []
    for candidate in space.candidates:
        if not candidate.is_baseline:
            rejected = rejection(forecaster.forecast(candidate.config, replays=False), bound)
            if rejected is not None:
                term = max(rejected.bill, key=lambda name: rejected.bill[name])
                hopeless.append((rejected.needed_bytes or 0, candidate.id, f"{term} in {rejected.phase}"))
    return space.without({identity: reason for _, identity, reason in sorted(hopeless)[NEAREST:]})


def rejection(forecast: Forecast, reject_probability: float) -> Rejected | None:
    """The outcome of a trial that is not worth a launch; None for one that is."""
    odds, bill = forecast.probability_fits, forecast.verdict.bill
    if odds is None or 1 - odds <= reject_probability:
        return None
    host_odds = forecast.host_probability_fits
    # both odds multiplied are `odds`: the host's are the smaller ones
    if host_odds < 1 and host_odds**2 <= odds:
        return Rejected(
            probability_fits=odds,
            bill=dict(bill.host),
            phase=bill.host_phase,
            needed_bytes=bill.peak_host_bytes,
            capacity_bytes=forecast.host_limit_bytes,
            memory="host",
        )
    return Rejected(
        probability_fits=odds,
        bill={**bill.phases[bill.binding_phase], **bill.device_overhead},
        phase=bill.binding_phase,
        needed_bytes=forecast.needed_bytes,
        capacity_bytes=forecast.verdict.capacity_bytes,
    )
