"""What FSDP keeps of layers that are recomputed by reentrant checkpoints, counted by hand."""

import numpy as np

from orchestrator.contract.config import Checkpointing, ModelSource
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
from orchestrator.predict.fsdp import fsdp_window
from orchestrator.predict.job import Job
from orchestrator.predict.memory import bill
from orchestrator.predict.overhead import CUDA
from orchestrator.predict.reentrant import with_kept_inputs
from orchestrator.predict.stream import stream_at
from orchestrator.predict.weights import weights_of

INPUT_BYTES = 1024
LAYER_BYTES = 4096


def three_layers(*, is_trained: bool, use_reentrant: bool) -> Profile:
    """Each layer's input is born in the forward pass and dies when its backward pass is over."""
    marks = [(layer, Mark.BEFORE_FORWARD, layer) for layer in range(3)]
    marks += [(3, Mark.PHASE, StepPhase.BACKWARD)]
    for done, layer in enumerate((2, 1, 0)):
        marks += [(3 + done, Mark.BEFORE_BACKWARD, layer), (4 + done, Mark.AFTER_BACKWARD, layer)]
    law = np.zeros((1, len(MONOMIALS)))
    law[0, 0] = INPUT_BYTES
    return Profile(
        request=TraceRequest(
            model=ModelSource(config={"model_type": "llama"}),
            gradient_checkpointing=Checkpointing.FULL,
            use_reentrant=use_reentrant,
        ),
        versions={},
        parameters=tuple(
            Parameter(
                name=f"{layer}.weight",
                numel_fixed=LAYER_BYTES // 2,
                bytes_per_element=2,
                is_trained=is_trained,
                layer=layer,
            )
            for layer in range(3)
        ),
        modules=tuple(Module(name=str(layer), parameters=(layer,)) for layer in range(3)),
        flops=(),
        buffers_bytes=0,
        laws=law,
        storage_law=np.zeros(3, dtype=np.int32),
        storage_place=np.full(3, Place.ACTIVATION, dtype=np.int8),
        events=np.array([1, 2, 3, -3, -2, -1], dtype=np.int32),
        marks=np.array(sorted(marks, key=lambda mark: mark[0]), dtype=np.int32),
    )


def test_inputs_and_their_gradients_stay() -> None:
    """Without the engine inputs go one by one; with it they stay, and all gradients of inputs but the latest."""
    profile = three_layers(is_trained=False, use_reentrant=True)
    stream = stream_at(profile, Point(1, 1))
    kept = with_kept_inputs(profile, stream).live_bytes[Place.ACTIVATION]
    assert stream.live_bytes[Place.ACTIVATION].max() == 3 * INPUT_BYTES
    assert stream.live_bytes[Place.ACTIVATION][-1] == 0
    # three inputs, and two gradients: that of the first layer's input is the one that the stream itself makes
    assert kept[-1] == 5 * INPUT_BYTES


def test_no_unit_is_gathered_ahead() -> None:
    profile = three_layers(is_trained=False, use_reentrant=True)
    job = Job(Point(1, 1), world_size=2, ranks_on_node=2, engine="fsdp")
    weights = weights_of(profile.parameters, job, "bf16")
    ahead, alone = (
        fsdp_window(weights, profile.modules, profile.marks, job, "bf16", gathers_ahead=gathers_ahead).max()
        for gathers_ahead in (True, False)
    )
    assert ahead == 2 * alone
    assert alone >= LAYER_BYTES


def test_only_frozen_units_keep_them() -> None:
    """A trained unit is told by its gradient when to divide itself again."""
    job = Job(Point(1, 1), world_size=2, ranks_on_node=2, engine="fsdp", master_dtype=None)

    def activations(*, is_trained: bool, use_reentrant: bool) -> int:
        profile = three_layers(is_trained=is_trained, use_reentrant=use_reentrant)
        found = bill(profile, job, CUDA)
        return max(terms.get("activations", 0) for terms in found.phases.values())

    assert activations(is_trained=False, use_reentrant=True) > 3 * INPUT_BYTES
    assert activations(is_trained=False, use_reentrant=False) == 3 * INPUT_BYTES
    assert activations(is_trained=True, use_reentrant=True) == 3 * INPUT_BYTES
