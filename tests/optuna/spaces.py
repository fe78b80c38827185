"""A real space over a small model, and a made-up device to measure its candidates on."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fakes import ok, oom, spec

from orchestrator.backends.optuna_study import OptunaStrategy
from orchestrator.contract.config import Precision
from orchestrator.contract.facts import DataFacts, Facts, ModelFacts
from orchestrator.contract.outcome import Outcome
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.search.ranking import objective_values
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.sweep import Objective, Sampler, SearchSection, TrainSection

SPEED = (Objective(),)
SPEED_AND_MEMORY = (Objective(), Objective(metric="peak_memory_bytes", goal="minimize"))
MEDIUM = {
    "method": ("lora",),
    "lora_rank": (8, 32, 128),
    "zero_stage": (0, 1, 3),
    "offload_optimizer": ("none", "cpu"),
    "micro_batch": (1, 4, 16, 64),
}
SMALL = {"zero_stage": (0, 1, 2), "gradient_checkpointing": ("none", "full"), "micro_batch": (1, 2)}
"""field-cases G4: 3 x 2 x 2."""


def facts() -> Facts:
    """What the preflight would have found."""
    return Facts(
        model=ModelFacts(
            model_type="llama",
            total_parameters=1_000_000,
            linear_layers=(),
            adaptable=("q_proj", "v_proj"),
            hidden_size=64,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            vocab_size=1000,
            tied_embeddings=True,
            max_position_embeddings=512,
        ),
        data=DataFacts(
            directory="/rows",
            digest="d1",
            format="text",
            rows=100,
            tokens=10_000,
            longest_row_tokens=128,
            mean_row_tokens=100.0,
            median_row_tokens=100.0,
            truncated_rows=0,
            vocab_size=1000,
            pad_token_id=0,
            tokenizer="trained from the data",
        ),
        device="cpu",
        device_name="test",
        peak_flops_per_s={Precision.FP32: 1e11, Precision.BF16: 1e11},
        peak_source="test",
        versions={},
    )


def search(knobs: dict[str, tuple[object, ...]], sampler: Sampler, **fields: object) -> SearchSection:
    """A search section over `knobs`."""
    return SearchSection.model_validate({"sampler": sampler, "knobs": knobs, **fields})


def space_of(section: SearchSection, global_batch: int = 64, **sections: object) -> Space:
    """The space of a search section."""
    train = TrainSection(global_batch=global_batch, learning_rate=1e-4)
    return build_space(spec(search=section, train=train, **sections), facts())


def device(candidate: Candidate) -> Outcome:
    """field-cases G1: out of memory when micro-batch times rank is above 512; faster with a larger micro-batch, slower
    with checkpointing, offload and stages."""
    knobs = candidate.config.knobs
    assert knobs.lora_rank is not None
    used = knobs.micro_batch * knobs.lora_rank
    if used > 512:
        return oom(needed_bytes=1000 * used // 512)
    speed = 100.0 * knobs.micro_batch**0.5 / (1 + 0.1 * knobs.zero_stage)
    speed *= 0.7 if knobs.gradient_checkpointing == "full" else 1.0
    speed *= 0.5 if knobs.offload_optimizer == "cpu" else 1.0
    return ok(tokens_per_second=speed, peak_memory_bytes=1000 * used // 512 + 1)


def fits(candidate: Candidate) -> Outcome:
    """Everything runs; larger micro-batches faster and heavier."""
    micro_batch = candidate.config.knobs.micro_batch
    return ok(tokens_per_second=100.0 * micro_batch, peak_memory_bytes=10 * micro_batch)


def record_of(candidate: Candidate, trial: int, outcome: Outcome | None) -> TrialRecord:
    """The ledger's record of a trial."""
    attempt = AttemptRecord(attempt=1, token=f"t{trial}", dispatched_s=1.0, outcome=outcome)
    return TrialRecord(
        trial=trial,
        candidate=candidate.id,
        label=candidate.label,
        is_baseline=candidate.is_baseline,
        config=candidate.config,
        attempts=(attempt,),
    )


class Session:
    """Drives a strategy as the loop does, and keeps the records from which the next session starts."""

    def __init__(self, space: Space, section: SearchSection, folder: Path, objectives: Sequence[Objective] = SPEED):
        self._space = space
        self._section = section
        self._folder = folder
        self._objectives = objectives
        self.records: list[TrialRecord] = []
        self.strategy = self.open()

    def open(self) -> OptunaStrategy:
        """A strategy made from the records so far."""
        self.strategy = OptunaStrategy(self._space, self._section, self._objectives, self._folder, self.records)
        return self.strategy

    def start(self) -> TrialRecord | None:
        """Ask, and record the trial as running."""
        candidate = self.strategy.ask()
        if candidate is None:
            return None
        self.records.append(record_of(candidate, len(self.records), None))
        return self.records[-1]

    def finish(self, trial: int, outcome: Outcome) -> None:
        """Record the trial's end and tell it."""
        running = self.records[trial]
        candidate = Candidate(running.candidate, running.label, running.config, running.is_baseline)
        self.records[trial] = record_of(candidate, trial, outcome)
        self.strategy.tell(candidate, outcome, objective_values(self._objectives, self.records[trial]))

    def run(self, trials: int, measure: Callable[[Candidate], Outcome]) -> list[TrialRecord]:
        """One trial after the other until `trials` are recorded or nothing is left to try."""
        while len(self.records) < trials:
            started = self.start()
            if started is None:
                break
            candidate = Candidate(started.candidate, started.label, started.config)
            self.finish(started.trial, measure(candidate))
        return self.records
