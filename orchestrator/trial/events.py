"""The attempt's event file: where a trial is, written so that a killed one still tells."""

import os
import time
from pathlib import Path
from typing import Literal

from orchestrator.contract.outcome import Phase
from orchestrator.contract.rank import Event


class EventLog:
    """Appends one rank's events and remembers where the rank is.

    Every line is one `write` on a descriptor opened with O_APPEND, so the ranks of a node may share the file.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.phase = Phase.START
        self.step = 0
        """Optimizer steps that were finished, the probe included."""
        self.batch_tokens: int | None = None
        """Tokens, padding included, of the micro-batch that is running."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._has_first_step = False
        self._write("phase")

    def enter(self, phase: Phase) -> None:
        """Note the phase when it differs from the present one."""
        if phase != self.phase:
            self.phase = phase
            self._write("phase")

    def begin_step(self, probe: bool) -> None:
        """An optimizer step starts. The first one of all is the `first_step` event."""
        if not self._has_first_step:
            self._has_first_step = True
            self._write("first_step", step=self.step)
        if probe:
            self._write("probe", step=self.step)

    def end_step(self, tokens: int, step_s: float) -> None:
        """An optimizer step over `tokens` non-padding tokens of all ranks took `step_s` seconds."""
        self.step += 1
        self.batch_tokens = None
        self._write("step", step=self.step, tokens=tokens, step_s=step_s)

    def end_eval_batch(self, tokens: int) -> None:
        """One micro-batch of held-out rows was predicted, `tokens` tokens of this rank."""
        self._write("eval", tokens=tokens)

    def _write(
        self,
        event: Literal["phase", "step", "first_step", "probe", "eval"],
        step: int | None = None,
        tokens: int | None = None,
        step_s: float | None = None,
    ) -> None:
        line = Event(
            event=event,
            time_s=time.time(),
            rank=self.rank,
            phase=self.phase.value,
            step=self.step if step is None else step,
            tokens=tokens,
            step_s=step_s,
        )
        os.write(self._descriptor, line.model_dump_json(exclude_none=True).encode() + b"\n")
