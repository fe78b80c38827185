"""Fakes that implement the sweep's ports, and records to feed them."""

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.contract.config import DataSource, Knobs, Limits, Method, ModelSource, TrainSettings, TrialConfig
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import (
    Cancelled,
    Measurement,
    Ok,
    OomDevice,
    Outcome,
    OverLimit,
    Phase,
    RankMemory,
)
from orchestrator.contract.rank import Event
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.placement.cluster import ClusterView, NodeView
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import (
    BudgetSection,
    ConfirmSection,
    DataSection,
    MeasureSection,
    ModelSection,
    SweepSpec,
    TrainSection,
)
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.ports import Ended, Launch

LIMIT_BYTES = 1000


def config(micro_batch: int = 1, lora_rank: int | None = None, world_size: int = 1) -> TrialConfig:
    """A configuration that differs from others by its micro-batch and rank alone."""
    method = Method.FULL if lora_rank is None else Method.LORA
    return TrialConfig(
        knobs=Knobs(method=method, lora_rank=lora_rank, micro_batch=micro_batch),
        model=ModelSource(config={"model_type": "llama"}),
        data=DataSource(directory="/data", digest="d" * 12, sequence_length=128),
        train=TrainSettings(global_batch=micro_batch * world_size, learning_rate=1e-4),
        limits=Limits(device_memory_bytes=LIMIT_BYTES),
        world_size=world_size,
        gradient_accumulation=1,
    )


def candidate(micro_batch: int = 1, lora_rank: int | None = None, is_baseline: bool = False) -> Candidate:
    """A candidate labelled by its micro-batch and rank."""
    built = config(micro_batch, lora_rank)
    return Candidate(built.candidate, f"mb{micro_batch} r{lora_rank}", built, is_baseline)


def measurement(tokens_per_second: float = 100.0, peak_memory_bytes: int = 500) -> Measurement:
    """A measurement with the given speed and peak."""
    return Measurement(
        tokens_per_second=tokens_per_second,
        tokens_per_second_low=tokens_per_second * 0.99,
        tokens_per_second_high=tokens_per_second * 1.01,
        tokens=1000,
        padding_tokens=100,
        padding_fraction=0.09,
        sequences=10,
        sum_squared_lengths=100_000,
        measured_steps=3,
        measured_s=1000 / tokens_per_second,
        step_s=(0.3, 0.2, 0.4),
        peak_memory_bytes=peak_memory_bytes,
        peak_resident_bytes=peak_memory_bytes // 2,
        limit_bytes=LIMIT_BYTES,
        ranks=(RankMemory(rank=0, peak_memory_bytes=peak_memory_bytes, peak_resident_bytes=peak_memory_bytes // 2),),
        probe_row_tokens=128,
        reaches_sequence_length=True,
        trainable_parameters=10,
        total_parameters=100,
        first_loss=2.0,
        last_loss=1.0,
        device="cpu",
        device_name="test",
        threads_per_rank=1,
        resolved={"train_micro_batch_size_per_gpu": 1},
    )


def ok(tokens_per_second: float = 100.0, peak_memory_bytes: int = 500) -> Ok:
    """A trial that fits."""
    return Ok(measurement=measurement(tokens_per_second, peak_memory_bytes))


def over_limit(tokens_per_second: float = 100.0, peak_memory_bytes: int = 990) -> OverLimit:
    """A trial that ran but left too little headroom."""
    return OverLimit(measurement=measurement(tokens_per_second, peak_memory_bytes))


def oom(needed_bytes: int = 1500) -> OomDevice:
    """A trial that ran out of device memory, having needed at least `needed_bytes`."""
    return OomDevice(
        phase=Phase.BACKWARD,
        rank=0,
        requested_bytes=needed_bytes - 900,
        allocated_bytes=900,
        limit_bytes=LIMIT_BYTES,
        evidence="DefaultCPUAllocator: can't allocate memory",
    )


def spec(name: str = "sweep", budget: BudgetSection | None = None, **sections: object) -> SweepSpec:
    """A spec whose sections beyond name and budget hardly matter; nothing is raced or confirmed unless they say so."""
    return SweepSpec.model_validate(
        {
            "version": 1,
            "name": name,
            "model": ModelSection(config={"model_type": "llama"}),
            "data": DataSection(path="rows.jsonl", sequence_length=128),
            "train": TrainSection(global_batch=8, learning_rate=1e-4),
            "budget": budget or BudgetSection(),
            "measure": MeasureSection(racing=False, confirm=ConfirmSection(top=0)),
            **sections,
        }
    )


def sweep_record(of: SweepSpec) -> SweepRecord:
    """The record that the command line writes before it starts a sweep."""
    return SweepRecord(
        name=of.name,
        sweep_id=f"{of.name}-id",
        state=SweepState.RUNNING,
        spec=of.model_dump(mode="json"),
        spec_digest="0" * 12,
        spec_path="spec.yaml",
        created_s=1_000_000.0,
        updated_s=1_000_000.0,
    )


def new_ledger(home: Path, of: SweepSpec) -> Ledger:
    """A ledger with the sweep's record in place, as the command line leaves it."""
    ledger = Ledger(home, of.name)
    if not ledger.exists():
        ledger.write_sweep(sweep_record(of))
    return ledger


class FakePool:
    """A pool whose trials end as `script` says: by an outcome, or never (None) until they are cancelled.

    `trial_s` is how long each trial takes. `on_wait` is called at every `wait`, before ends are gathered.
    """

    def __init__(
        self,
        script: Callable[[Launch], Outcome | None],
        slots: int = 1,
        trial_s: float = 0.0,
        on_wait: Callable[["FakePool"], None] | None = None,
    ) -> None:
        self._script = script
        self._slots = slots
        self._trial_s = trial_s
        self._on_wait = on_wait
        self.launched: list[Launch] = []
        self.running: dict[str, tuple[Launch, float]] = {}
        self.cancelled: list[str] = []
        self.most_running = 0
        self.injected: list[Ended] = []
        """Ends that the next `wait` returns beside the real ones."""

    def cluster(self) -> ClusterView:
        node = NodeView(name="fake", address="127.0.0.1", devices=self._slots, free_devices=self._slots)
        return ClusterView(nodes=(node,), device_kind="CPU slot")

    def check(self, world_size: int, nodes: int | None) -> None:
        return None

    def use(self, kind: str | None) -> None:
        return None

    def waits_for(self) -> str:
        return ""

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset(), nodes: int | None = None) -> bool:
        return self.free_slots >= world_size

    @property
    def free_slots(self) -> int:
        return self._slots - sum(launch.config.world_size for launch, _ in self.running.values())

    def launch(self, launch: Launch) -> None:
        assert self.has_room(launch.config.world_size, nodes=launch.config.nodes), "launched without room"
        assert AttemptFiles(launch.directory).read_config() == launch.config
        self.launched.append(launch)
        self.running[launch.token] = (launch, time.monotonic())
        self.most_running = max(self.most_running, len(self.running))

    def wait(self, timeout_s: float) -> list[Ended]:
        if self._on_wait is not None:
            self._on_wait(self)
        if self._trial_s:
            time.sleep(min(timeout_s, self._trial_s / 4))
        ends, self.injected = self.injected, []
        for token, (launch, started_s) in list(self.running.items()):
            outcome = Cancelled() if token in self.cancelled else self._script(launch)
            if outcome is None or (time.monotonic() - started_s < self._trial_s and token not in self.cancelled):
                continue
            del self.running[token]
            AttemptFiles(launch.directory).write_outcome(outcome)
            ends.append(Ended(token, outcome, node="fake"))
        return ends

    def cancel(self, token: str) -> None:
        self.cancelled.append(token)

    def close(self) -> None:
        self.running.clear()


class FakeStrategy:
    """Proposes `candidates` in order, without those that `records` know, and says `gain` of each."""

    def __init__(
        self, candidates: Iterable[Candidate], records: Iterable[TrialRecord] = (), gain: float | None = None
    ) -> None:
        self.gain = gain
        known = {record.candidate for record in records}
        self._left = itertools.filterfalse(lambda each: each.id in known, candidates)
        self.told: list[tuple[Candidate, Outcome, tuple[float, ...] | None]] = []

    def ask(self) -> Candidate | None:
        return next(self._left, None)

    def expected_gain(self) -> float | None:
        return self.gain

    def tell(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> None:
        self.told.append((candidate, outcome, values))

    def close(self) -> None:
        return None


class FakeRunLog:
    """Remembers everything it hears."""

    def __init__(self) -> None:
        self.sweeps: list[SweepRecord] = []
        self.trials: list[TrialRecord] = []

    def sweep_changed(self, sweep: SweepRecord) -> None:
        self.sweeps.append(sweep)

    def trial_changed(self, trial: TrialRecord) -> None:
        self.trials.append(trial)

    def close(self) -> None:
        return None


def write_first_step(directory: Path, rank: int, time_s: float) -> None:
    """Append the event that tells when a rank began its first training step."""
    event = Event(event="first_step", time_s=time_s, rank=rank, phase="forward", step=1)
    with AttemptFiles(directory).events.open("a") as events:
        events.write(event.model_dump_json() + "\n")
