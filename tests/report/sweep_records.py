"""Records of a small sweep with every kind of end, for the renderers and exports to work on."""

from orchestrator.contract.config import (
    DataSource,
    Knobs,
    Limits,
    Method,
    ModelSource,
    Offload,
    TrainSettings,
    TrialConfig,
)
from orchestrator.contract.facts import DataFacts, Facts, ModelFacts
from orchestrator.contract.outcome import Crashed, Measurement, Ok, OomDevice, Outcome, Phase, RankMemory
from orchestrator.contract.record import AttemptRecord, SweepRecord, SweepState, TrialRecord
from orchestrator.contract.units import GIB, MIB

LIMIT_BYTES = GIB


def measurement(speed: float, peak_bytes: int, interval: float = 0.01, **changes: object) -> Measurement:
    """A run at `speed` tokens/s whose 95 % interval is `interval` of it on either side."""
    fields: dict[str, object] = {
        "tokens_per_second": speed,
        "tokens_per_second_low": speed * (1 - interval),
        "tokens_per_second_high": speed * (1 + interval),
        "tokens": 9000,
        "padding_tokens": 1000,
        "padding_fraction": 0.1,
        "sequences": 24,
        "sum_squared_lengths": 4_000_000,
        "measured_steps": 3,
        "measured_s": 9000 / speed,
        "step_s": (3000 / speed,) * 3,
        "peak_memory_bytes": peak_bytes,
        "peak_resident_bytes": peak_bytes // 10 * 9,
        "limit_bytes": LIMIT_BYTES,
        "ranks": (RankMemory(rank=0, peak_memory_bytes=peak_bytes, peak_resident_bytes=peak_bytes // 10 * 9),),
        "probe_row_tokens": 512,
        "reaches_sequence_length": True,
        "trainable_parameters": 1_000_000,
        "total_parameters": 1_000_000,
        "first_loss": 6.2,
        "last_loss": 5.9,
        "device": "cpu",
        "device_name": "Test CPU, 2 cores",
        "threads_per_rank": 1,
        "resolved": {"deepspeed": {"zero_optimization": {"stage": 0}}},
    }
    return Measurement.model_validate(fields | changes)


def config(**knobs: object) -> TrialConfig:
    """A one-rank trial on prepared rows with a global batch of 8."""
    settings = Knobs.model_validate({"method": Method.FULL, "micro_batch": 2} | knobs)
    return TrialConfig(
        knobs=settings,
        model=ModelSource(config={"model_type": "llama", "hidden_size": 64}),
        data=DataSource(directory="/data/rows", digest="d1", sequence_length=512),
        train=TrainSettings(global_batch=8, learning_rate=1e-4),
        limits=Limits(device_memory_bytes=LIMIT_BYTES),
        world_size=1,
        gradient_accumulation=8 // settings.micro_batch,
    )


def trial(number: int, label: str, outcome: Outcome | None, is_baseline: bool = False, **knobs: object) -> TrialRecord:
    """A trial that ended in its first attempt, or still runs."""
    content = config(**knobs)
    attempt = AttemptRecord(
        attempt=1,
        token=f"t{number}",
        dispatched_s=100.0,
        ended_s=110.0 if outcome is not None else None,
        node="n1",
        launch_overhead_s=0.8,
        outcome=outcome,
    )
    return TrialRecord(
        trial=number,
        candidate=content.candidate,
        label=label,
        is_baseline=is_baseline,
        config=content,
        attempts=(attempt,),
        mfu=0.31 if isinstance(outcome, Ok) else None,
        hfu=0.42 if isinstance(outcome, Ok) else None,
    )


def make_trials() -> list[TrialRecord]:
    """A baseline, two faster trials that cannot be told apart, a slower one, two that need more memory, a crash."""
    oom = OomDevice(
        phase=Phase.BACKWARD,
        rank=0,
        requested_bytes=200 * MIB,
        allocated_bytes=900 * MIB,
        limit_bytes=LIMIT_BYTES,
        evidence="DefaultCPUAllocator: can't allocate memory",
    )
    unknown = OomDevice(phase=Phase.INIT, rank=0, limit_bytes=LIMIT_BYTES, evidence="MemoryError")
    crash = Crashed(phase=Phase.LOAD, rank=0, error="ValueError: no such head\nmore", exit_code=1)
    return [
        trial(0, "full z0 mb2", Ok(measurement=measurement(1000.0, 800 * MIB)), is_baseline=True),
        trial(1, "full z0 mb4", Ok(measurement=measurement(1500.0, 950 * MIB)), micro_batch=4),
        trial(
            2, "lora8 z0 mb4", Ok(measurement=measurement(1510.0, 700 * MIB)), method="lora", lora_rank=8, micro_batch=4
        ),
        trial(3, "full z3 mb2", Ok(measurement=measurement(400.0, 500 * MIB)), zero_stage=3),
        trial(4, "full z0 mb8", oom, micro_batch=8),
        trial(5, "full z1 mb8", unknown, zero_stage=1, micro_batch=8, offload_optimizer=Offload.NONE),
        trial(6, "lora4 z0 mb2", crash, method="lora", lora_rank=4),
        trial(7, "lora4 z1 mb2", None, method="lora", lora_rank=4, zero_stage=1),
    ]


def make_facts() -> Facts:
    """A preflight's findings on a CPU machine."""
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
        ),
        data=DataFacts(
            directory="/data/rows",
            digest="d1",
            format="alpaca",
            rows=120,
            tokens=24_000,
            longest_row_tokens=512,
            mean_row_tokens=200.0,
            median_row_tokens=180.0,
            truncated_rows=3,
            vocab_size=1000,
            pad_token_id=0,
            tokenizer="trained from the data",
        ),
        device="cpu",
        device_name="Test CPU, 2 cores",
        peak_flops_per_s={"fp32": 1e11, "bf16": 2e11},
        peak_source="a measured matrix product",
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
    )


def make_sweep() -> SweepRecord:
    """A finished sweep."""
    return SweepRecord(
        name="quickstart",
        sweep_id="s1",
        state=SweepState.FINISHED,
        spec={"name": "quickstart"},
        spec_digest="x",
        spec_path="quickstart.yaml",
        created_s=90.0,
        updated_s=200.0,
        elapsed_s=110.0,
        candidates=8,
        reason="the space is exhausted",
    )
