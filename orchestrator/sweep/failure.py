"""Does every trial fail for one and the same reason? Then more trials teach nothing."""

from orchestrator.contract.outcome import Crashed, Infra, Invalid
from orchestrator.contract.record import TrialRecord


def failure_line(record: TrialRecord) -> str | None:
    """First line of the error that a configuration or its surroundings caused; None for every other outcome."""
    match record.outcome:
        case Invalid(reason=text) | Crashed(error=text) | Infra(cause=text):
            return text.strip().partition("\n")[0]
        case _:
            return None


class FailureTally:
    """Counts final trials and the distinct errors among them."""

    def __init__(self) -> None:
        self._trials = 0
        self._lines: set[str | None] = set()

    def add(self, record: TrialRecord) -> None:
        """Count a trial that is over for good."""
        self._trials += 1
        self._lines.add(failure_line(record))

    def common_failure(self, at_least: int) -> str | None:
        """The error that every trial so far shares, when there are `at_least` of them."""
        shared = next(iter(self._lines)) if len(self._lines) == 1 else None
        return shared if self._trials >= at_least else None
