"""Where each rank is, read from the attempt's events as they are written."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from orchestrator.contract.outcome import Phase
from orchestrator.contract.rank import Event


@dataclass
class RankProgress:
    """The last sign of life of one rank. `last_s` is the watcher's clock, not that of the rank's node."""

    last_s: float
    phase: Phase = Phase.START


class Progress:
    """Follows `events.jsonl`. `read` costs one short read when nothing is new."""

    def __init__(self, events: Path) -> None:
        self.ranks: dict[int, RankProgress] = {}
        self._early: dict[int, Phase] = {}
        """Phases of ranks that have written before their hosts said that they exist."""
        self._path = events
        self._offset = 0

    def begin(self, rank: int, now_s: float) -> None:
        """The rank's process exists since `now_s`."""
        self.ranks[rank] = RankProgress(last_s=now_s, phase=self._early.get(rank, Phase.START))

    def read(self, now_s: float) -> None:
        """Take in what was written since the last call; a line that is still being written waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line, now_s)

    def _take(self, line: bytes, now_s: float) -> None:
        try:
            event = Event.model_validate_json(line)
        except ValidationError:
            # a line torn by the end of its writer tells nothing, and is no reason to stop watching the others
            return
        rank = self.ranks.get(event.rank)
        if rank is None:
            self._early[event.rank] = Phase(event.phase)
            return
        rank.last_s = now_s
        rank.phase = Phase(event.phase)

    def phase(self, rank: int) -> Phase:
        """The rank's last known phase."""
        return self.ranks[rank].phase if rank in self.ranks else Phase.START
