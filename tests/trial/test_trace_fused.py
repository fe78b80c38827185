"""What fused kernels keep for the backward pass, beside a model's own operations."""

import numpy as np
import pytest

from orchestrator.contract.config import ModelSource
from orchestrator.contract.profile import Kernels, Point, TraceRequest
from orchestrator.predict.stream import stream_at
from orchestrator.trial.trace.profile import make_profile

HIDDEN, INTERMEDIATE, HEADS, LAYERS = 64, 160, 4, 3
POINT = Point(micro_batch=8, sequence_tokens=512)
TOKENS = POINT.micro_batch * POINT.sequence_tokens
HALF_BYTES = 2


@pytest.fixture(scope="module")
def kept_bytes() -> dict[Kernels, int]:
    """What lives when the backward pass of a small Llama starts, by its kernels."""
    model = ModelSource(
        config={
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "vocab_size": 331,
        }
    )
    found = {}
    for kernels in Kernels:
        stream = stream_at(make_profile(TraceRequest(model=model, kernels=kernels)), POINT)
        found[kernels] = int(sum(live[stream.backward_start] for live in stream.live_bytes.values()))
    return found


def test_a_fused_gate_keeps_one_factor_less(kept_bytes: dict[Kernels, int]) -> None:
    """silu(gate), which the product needs in its own backward pass, is made anew from the gate."""
    spared = kept_bytes[Kernels.FUSED_NORMS] - kept_bytes[Kernels.LIGER]
    assert spared == LAYERS * TOKENS * INTERMEDIATE * HALF_BYTES


def test_a_fused_norm_keeps_its_input_alone(kept_bytes: dict[Kernels, int]) -> None:
    """A norm of transformers keeps its input in float32 and the normed rows, six bytes an element; a fused one keeps
    the input itself, which nothing else would: two. There are two norms in a layer and a last one."""
    spared = kept_bytes[Kernels.TRANSFORMERS] - kept_bytes[Kernels.FUSED_NORMS]
    assert np.isclose(spared, (2 * LAYERS + 1) * TOKENS * HIDDEN * 4, rtol=0.01)
