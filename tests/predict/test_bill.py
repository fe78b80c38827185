"""The bill composes what a trace and an engine say: a maximum over phases, by term, on a device and its host."""

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.contract.config import ModelSource
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import (
    MONOMIALS,
    Mark,
    Module,
    Parameter,
    Place,
    Point,
    Profile,
    StepPhase,
    TraceRequest,
)
from orchestrator.contract.units import GIB, MIB
from orchestrator.predict.job import Job
from orchestrator.predict.memory import bill
from orchestrator.predict.overhead import Overhead
from orchestrator.predict.terms import total
from orchestrator.predict.verdict import Spread, judge, probability_fits

NUMEL = 1_000_000
NOTHING = Overhead(context_bytes=0, communicator_bytes=0, workspace_bytes=0, process_bytes=0)
TOKEN_BYTES = 1024
POINT = Point(2, 1000)


def one_weight(device: str = "cuda", dtype: str = "bf16") -> Profile:
    """One trained weight of a million elements; an activation of 1 KiB a token from forward to the end of backward,
    logits of 2 KiB a token from the end of the forward pass to the gradient, which comes in between."""
    tokens = MONOMIALS.index((1, 1, 0))
    laws = np.zeros((3, len(MONOMIALS)))
    laws[0, tokens], laws[1, tokens], laws[2, 0] = TOKEN_BYTES, 2 * TOKEN_BYTES, NUMEL * (2 if dtype == "bf16" else 4)
    marks = [
        (0, Mark.PHASE, StepPhase.FORWARD),
        (0, Mark.BEFORE_FORWARD, 0),
        (2, Mark.AFTER_FORWARD, 0),
        (2, Mark.PHASE, StepPhase.BACKWARD),
        (2, Mark.BEFORE_BACKWARD, 0),
        (3, Mark.GRADIENT, 0),
        (5, Mark.AFTER_BACKWARD, 0),
    ]
    return Profile(
        request=TraceRequest.model_validate({"model": ModelSource(id="x"), "device": device, "dtype": dtype}),
        versions={},
        parameters=(
            Parameter(name="w", numel_fixed=NUMEL, bytes_per_element=2 if dtype == "bf16" else 4, is_trained=True),
        ),
        modules=(Module(name="m", parameters=(0,)),),
        flops=(),
        buffers_bytes=0,
        laws=laws,
        storage_law=np.array([0, 1, 2], dtype=np.int32),
        storage_place=np.array([Place.ACTIVATION, Place.LOGITS, Place.GRADIENT], dtype=np.int8),
        events=np.array([1, 2, 3, -2, -1], dtype=np.int32),
        marks=np.array(marks, dtype=np.int32),
    )


def plain(**settings: object) -> Job:
    return replace(Job(point=POINT, engine="torch", master_dtype=None), **settings)  # type: ignore[arg-type]


def rounded(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512


def test_the_peak_is_the_highest_moment_of_the_highest_phase() -> None:
    made = bill(one_weight(), plain(), NOTHING)
    weights, states, tokens = 2 * NUMEL, 4 * NUMEL + 4, POINT.micro_batch * POINT.sequence_tokens
    assert total(made.phases[Phase.LOAD]) == weights
    assert total(made.phases[Phase.FORWARD]) == weights + states + rounded(3 * TOKEN_BYTES * tokens)
    # logits and activations are alive when the gradient is born
    assert total(made.phases[Phase.BACKWARD]) == weights + states + 3 * TOKEN_BYTES * tokens + rounded(2 * NUMEL)
    assert total(made.phases[Phase.OPTIMIZER_STEP]) == weights + states + 2 * NUMEL
    assert made.binding_phase is Phase.BACKWARD
    assert made.peak_allocated_bytes == total(made.phases[Phase.BACKWARD])
    assert made.phases[Phase.BACKWARD]["logits"] == 2 * TOKEN_BYTES * tokens


def test_few_tokens_bind_in_the_optimizer_step_and_its_loop_matters() -> None:
    few = replace(POINT, micro_batch=1, sequence_tokens=8)
    fused = bill(one_weight(), plain(point=few), NOTHING)
    foreach = bill(one_weight(), plain(point=few, optimizer_loop="foreach"), NOTHING)
    assert foreach.binding_phase is Phase.OPTIMIZER_STEP
    step = foreach.phases[Phase.OPTIMIZER_STEP]
    assert total(step) - total(fused.phases[Phase.OPTIMIZER_STEP]) == step["optimizer_temporaries"] == 2 * NUMEL


def test_gradients_of_earlier_micro_steps_stand_beside_the_forward_pass() -> None:
    once, twice = (
        bill(one_weight(), plain(gradient_accumulation=steps), NOTHING).phases[Phase.FORWARD] for steps in (1, 2)
    )
    assert total(twice) - total(once) == 2 * NUMEL


def test_a_sharded_weight_is_gathered_for_its_module() -> None:
    job = Job(
        point=POINT, zero_stage=3, world_size=4, ranks_on_node=4, reduce_bucket_size=1000,
        stage3_param_persistence_threshold=0,
    )  # fmt: skip
    made = bill(one_weight(), job, NOTHING)
    assert made.phases[Phase.FORWARD]["trained_weights"] == 2 * NUMEL // 4
    assert made.phases[Phase.FORWARD]["gathered_weights"] >= 2 * NUMEL
    assert made.phases[Phase.BACKWARD]["master_weights"] == 4 * NUMEL // 4


def test_what_is_offloaded_lies_on_the_host_of_a_gpu_and_in_the_process_of_a_cpu() -> None:
    job = Job(point=POINT, zero_stage=2, offload_optimizer="cpu", pin_memory=False, reduce_bucket_size=1000)
    on_gpu = bill(one_weight(), job, NOTHING)
    on_cpu = bill(one_weight(device="cpu"), job, NOTHING)
    assert "offloaded_optimizer" not in on_gpu.phases[Phase.BACKWARD]
    assert on_gpu.host["offloaded_optimizer"] >= 12 * NUMEL
    assert on_cpu.phases[Phase.BACKWARD]["offloaded_optimizer"] == on_gpu.host["offloaded_optimizer"]


def test_a_host_that_loads_a_copy_for_each_rank_holds_most_then() -> None:
    job = Job(point=POINT, zero_stage=2, world_size=8, ranks_on_node=8, reduce_bucket_size=1000)
    made = bill(one_weight(), job, NOTHING)
    assert made.host_phase is Phase.LOAD
    assert made.host == {"load_copy": 8 * 2 * NUMEL}


def test_what_lies_outside_of_the_allocator_is_named_apart() -> None:
    beside = Overhead(context_bytes=GIB, communicator_bytes=MIB, workspace_bytes=0, process_bytes=0)
    alone = bill(one_weight(), plain(), beside)
    together = bill(one_weight(), plain(world_size=2), beside)
    assert alone.peak_device_bytes - alone.peak_allocated_bytes == GIB
    assert together.device_overhead == {"context": GIB, "communicator": MIB}


def test_the_verdict_follows_the_capacity() -> None:
    needed = judge(one_weight(), plain(), NOTHING, None).needed_bytes
    probabilities = [
        judge(one_weight(), plain(), NOTHING, round(needed * share)).probability_fits for share in (0.8, 1.0, 1.2)
    ]
    assert probabilities[0] is not None
    assert probabilities[0] < 0.05
    assert probabilities[1] == pytest.approx(0.5, abs=0.05)
    assert probabilities[2] is not None
    assert probabilities[2] > 0.95
    assert judge(one_weight(), plain(), NOTHING, None).fits is None


def test_a_bias_that_was_measured_moves_the_boundary() -> None:
    assert probability_fits(100, 110, Spread(0.0, 0.05)) > 0.9
    assert probability_fits(100, 110, Spread(0.2, 0.05)) < 0.1
    assert probability_fits(100, 0, Spread()) == 0.0
