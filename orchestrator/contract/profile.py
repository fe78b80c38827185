"""What a trace of one training step tells: every storage's birth and death, with sizes as exact laws.

`python -m orchestrator.trial.trace DIR` reads `DIR/trace.json` (a `TraceRequest`) and writes `DIR/profile.npz` (a
`Profile`), or `DIR/error.json` with a `TraceFailure` and exit code 2.
"""

import io
import json
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue, TypeAdapter

from orchestrator.contract.config import Checkpointing, Frozen, ModelSource

TRACE_FILE = "trace.json"
PROFILE_FILE = "profile.npz"
TRACE_FAILURE_FILE = "error.json"

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class Quantization(StrEnum):
    """How frozen linear weights are stored. `nf4_double`: the scales are quantised too; `int4`: GPTQ, groups of 128."""

    NONE = "none"
    NF4 = "nf4"
    NF4_DOUBLE = "nf4_double"
    INT4 = "int4"
    INT8 = "int8"


class LossPath(StrEnum):
    """How logits become a loss. `transformers` is what the installed version does, the others what named code did.

    `transformers_4_45`: logits made float32 in the model, then shifted by a copy. `transformers_4_48`: half-precision
    logits kept in the output, then made float32 and shifted by a copy. The `_uncast` forms never make them float32, as
    GPT-2, BLOOM, GPT-NeoX, OPT, Falcon and their like did before 4.50. The `inplace_` forms write the gradient over the
    shifted copy. `fused_linear`: head and loss by chunks of rows, as Liger does; logits are never whole.
    """

    TRANSFORMERS = "transformers"
    TRANSFORMERS_4_45 = "transformers_4_45"
    TRANSFORMERS_4_48 = "transformers_4_48"
    TRANSFORMERS_UNCAST = "transformers_uncast"
    INPLACE_4_45 = "inplace_4_45"
    INPLACE_4_48 = "inplace_4_48"
    INPLACE_UNCAST = "inplace_uncast"
    FUSED_LINEAR = "fused_linear"


class Kernels(StrEnum):
    """Whose kernels a model computes with. `fused_norms`: one for each norm and for rotary embeddings, as unsloth and
    fms-acceleration have them; `liger`: the gated product of the MLP as well, as Liger-Kernel does."""

    TRANSFORMERS = "transformers"
    FUSED_NORMS = "fused_norms"
    LIGER = "liger"


class TraceRequest(Frozen):
    """A structure: all that decides which storages a step makes, but not their sizes (micro-batch, sequence, rank)."""

    model: ModelSource
    task: Literal["causal_lm", "sequence_classification", "masked_lm", "seq2seq_lm"] = "causal_lm"
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels are assumed: they keep different things for the backward pass."""
    dtype: Dtype = "bf16"
    """Of the base model's weights and, without autocast, of its computation."""
    autocast: Literal["bf16", "fp16"] | None = None
    adapter: dict[str, JsonValue] | None = None
    """peft's configuration (`peft_type` and its arguments, without the rank); None: all weights are trained."""
    adapter_dtype: Dtype | None = None
    """None: peft's own choice (float32 beside half-precision weights)."""
    has_rank: bool = True
    """Whether the adapter has a rank `r` that sizes may depend on."""
    quantization: Quantization = Quantization.NONE
    kbit_preparation: bool = False
    """peft's `prepare_model_for_kbit_training`: what is not quantised becomes float32."""
    kbit_norms_only: bool = False
    """Of that, only norms stay float32, as TRL's `peft_module_casting_to_bf16` leaves a model."""
    gradient_checkpointing: Checkpointing = Checkpointing.NONE
    use_reentrant: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    is_padded: bool = False
    """Rows are shorter than the batch: an attention mask takes part."""
    loss: LossPath = LossPath.TRANSFORMERS
    kernels: Kernels = Kernels.TRANSFORMERS
    keeps_outputs: bool = False
    """The loop holds the model's outputs (logits) during the backward pass."""
    beyond_window: bool = False
    """The sequence is longer than the model's sliding window or attention chunk."""


class Place(IntEnum):
    """What a storage is for, as far as a trace can tell."""

    INPUT = 0
    GRADIENT = 1
    """A trained parameter's gradient."""
    ACTIVATION = 2
    """Made in the forward pass (or its recomputation) and used in the backward pass."""
    LOGITS = 3
    """As ACTIVATION or TEMPORARY, of the size of tokens by vocabulary."""
    TEMPORARY = 4


class Mark(IntEnum):
    """What a mark in the stream says. The payload is a phase, a module or a parameter by its index."""

    PHASE = 0
    BEFORE_FORWARD = 1
    AFTER_FORWARD = 2
    BEFORE_BACKWARD = 3
    AFTER_BACKWARD = 4
    GRADIENT = 5
    """The parameter's gradient is whole."""


class StepPhase(IntEnum):
    """The phases of one micro-step, in the order of the stream."""

    FORWARD = 0
    BACKWARD = 1


class Parameter(Frozen):
    """One weight, tied ones once. `numel = numel_fixed + numel_per_rank * lora_rank`."""

    name: str
    numel_fixed: int
    numel_per_rank: int = 0
    bytes_per_element: float
    """As it is stored before any engine: a quantised weight's scales are counted in."""
    is_trained: bool
    layer: int = -1
    """Index of its decoder or encoder layer; -1: outside of the layers."""
    largest_axis: int = 1

    def numel(self, lora_rank: int) -> int:
        """Elements at that rank."""
        return self.numel_fixed + self.numel_per_rank * lora_rank


class Module(Frozen):
    """A module with weights of its own: what an engine that shards weights gathers at once."""

    name: str
    parameters: tuple[int, ...]
    """Indices into `Profile.parameters`."""


MONOMIALS: tuple[tuple[int, int, int], ...] = (
    (0, 0, 0),
    (0, 1, 0),
    (1, 0, 0),
    (1, 1, 0),
    (1, 2, 0),
    (0, 2, 0),
    (0, 0, 1),
    (0, 1, 1),
    (1, 0, 1),
    (1, 1, 1),
)
"""Exponents of (micro-batch, sequence, rank) that a law's coefficients belong to."""


@dataclass(frozen=True)
class Point:
    """Where laws are evaluated. `sequence_tokens` is the length of the batch with its padding."""

    micro_batch: int
    sequence_tokens: int
    lora_rank: int = 0

    def monomials(self) -> NDArray[np.float64]:
        """The value of each of MONOMIALS."""
        base = (self.micro_batch, self.sequence_tokens, self.lora_rank)
        return np.array([float(base[0] ** b * base[1] ** s * base[2] ** r) for b, s, r in MONOMIALS])


class FlopsLaw(Frozen):
    """Floating-point operations of one kind in one phase, as coefficients of MONOMIALS."""

    phase: Literal["forward", "backward", "recompute"]
    kind: Literal["linear", "attention"]
    coefficients: tuple[float, ...]

    def at(self, point: Point) -> float:
        """Operations of one micro-step at `point`."""
        return float(np.dot(self.coefficients, point.monomials()))


class TraceFailure(Frozen):
    """Why no profile can be made. `field` is the dotted place in the request."""

    field: str
    message: str


_PARAMETERS = TypeAdapter(tuple[Parameter, ...])
_MODULES = TypeAdapter(tuple[Module, ...])
_FLOPS = TypeAdapter(tuple[FlopsLaw, ...])


@dataclass(frozen=True)
class Profile:
    """One micro-step's storages in the order of birth and death, without weights and optimizer states.

    `laws[k]` are coefficients in bytes of MONOMIALS. Storage `i` has the size of `laws[storage_law[i]]` and the
    place `storage_place[i]`. `events` holds `i + 1` for the birth of storage `i` and `-(i + 1)` for its death; a
    storage that never dies lives past the backward pass. `marks[k]` is (position in events, Mark, payload): it stands
    before the event at that position.
    """

    request: TraceRequest
    versions: dict[str, str]
    parameters: tuple[Parameter, ...]
    modules: tuple[Module, ...]
    flops: tuple[FlopsLaw, ...]
    buffers_bytes: int
    laws: NDArray[np.float64]
    storage_law: NDArray[np.int32]
    storage_place: NDArray[np.int8]
    events: NDArray[np.int32]
    marks: NDArray[np.int32]

    def storage_bytes(self, point: Point) -> NDArray[np.int64]:
        """Bytes of every storage at `point`, before an allocator rounds them."""
        return np.rint(self.laws @ point.monomials()).astype(np.int64)[self.storage_law]

    def to_bytes(self) -> bytes:
        """As an `.npz` file."""
        header = {
            "request": self.request.model_dump(mode="json"),
            "versions": self.versions,
            "parameters": _PARAMETERS.dump_python(self.parameters, mode="json"),
            "modules": _MODULES.dump_python(self.modules, mode="json"),
            "flops": _FLOPS.dump_python(self.flops, mode="json"),
            "buffers_bytes": self.buffers_bytes,
        }
        stream = io.BytesIO()
        np.savez_compressed(
            stream,
            header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            laws=self.laws,
            storage_law=self.storage_law,
            storage_place=self.storage_place,
            events=self.events,
            marks=self.marks,
        )
        return stream.getvalue()


def read_profile(path: Path) -> Profile:
    """The profile in the `.npz` file at `path`."""
    with np.load(path, allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        return Profile(
            request=TraceRequest.model_validate(header["request"]),
            versions=header["versions"],
            parameters=_PARAMETERS.validate_python(header["parameters"]),
            modules=_MODULES.validate_python(header["modules"]),
            flops=_FLOPS.validate_python(header["flops"]),
            buffers_bytes=header["buffers_bytes"],
            laws=arrays["laws"],
            storage_law=arrays["storage_law"],
            storage_place=arrays["storage_place"],
            events=arrays["events"],
            marks=arrays["marks"],
        )
