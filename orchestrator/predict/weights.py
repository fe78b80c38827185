"""The model's weights as an engine holds them: cast to its precision, in storage elements, quantised scales apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.profile import DTYPE_BYTES, Dtype, Parameter
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.terms import Terms

_PACKED_BYTES = 2
"""Element of a packed quantised weight where `bnb_4bit_quant_storage` is the 16-bit type of the model. Engines that
shard weights leave others whole (peft docs, accelerate/deepspeed.md and accelerate/fsdp.md)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight in an engine. `numel` counts storage elements: four 4-bit weights are one element of 16 bits."""

    index: int
    """Into the profile's parameters."""
    numel: int
    element_bytes: int
    is_trained: bool
    layer: int
    largest_axis: int
    scales_bytes: int
    """Quantisation state beside the weight: no parameter, so no engine shards it."""
    stored_bytes: int
    """As the model was loaded, before any engine; with its scales."""

    @property
    def bytes(self) -> int:
        """Without the scales."""
        return self.numel * self.element_bytes

    def shard_numel(self, ranks: int) -> int:
        """Elements of one rank's part when this weight is divided for itself, padding included."""
        return -(-self.numel // ranks)

    def shard_bytes(self, ranks: int) -> int:
        """Of one rank's part."""
        return self.shard_numel(ranks) * self.element_bytes

    def padded_bytes(self, ranks: int) -> int:
        """Of all parts together."""
        return self.shard_bytes(ranks) * ranks


def weights_of(parameters: Sequence[Parameter], job: Job, precision: Dtype) -> tuple[Weight, ...]:
    """`parameters` at the job's rank, as its engine holds them.

    DeepSpeed with bf16 or fp16 enabled (a 16-bit `precision`) casts floating-point parameters to it
    (deepspeed 0.19.8, runtime/engine.py:1851-1862), but not in a model that was built in shards: adapters that peft
    made in float32 stay float32 there. FSDP and a plain loop keep the stored types; FSDP with mixed precision holds
    shards in `master_dtype`, but shards of packed weights as they are.
    """
    cast_bytes = DTYPE_BYTES[precision] if _casts(job, precision) else None
    is_sharded = job.engine == "fsdp" or job.zero_stage == 3
    return _weights(parameters, job.point.lora_rank, cast_bytes, job.quantised_storage == "uint8" and is_sharded)


@remembered(identities=1, size=256)
def _weights(
    parameters: Sequence[Parameter], lora_rank: int, cast_bytes: int | None, keeps_packed_whole: bool
) -> tuple[Weight, ...]:
    return tuple(
        _weight(index, parameter, lora_rank, cast_bytes, keeps_packed_whole)
        for index, parameter in enumerate(parameters)
    )


def _weight(
    index: int, parameter: Parameter, lora_rank: int, cast_bytes: int | None, keeps_packed_whole: bool
) -> Weight:
    numel = parameter.numel(lora_rank)
    stored_bytes = round(numel * parameter.bytes_per_element)
    scales_bytes = 0
    element_bytes = round(parameter.bytes_per_element)
    if parameter.bytes_per_element < _PACKED_BYTES:
        packed_bytes = -(-numel // 2) if parameter.bytes_per_element < 1 else numel
        scales_bytes = max(stored_bytes - packed_bytes, 0)
        numel, element_bytes = -(-packed_bytes // _PACKED_BYTES), _PACKED_BYTES
        if keeps_packed_whole:
            numel, scales_bytes = 0, stored_bytes
    elif cast_bytes is not None:
        element_bytes = cast_bytes
    return Weight(
        index=index,
        numel=numel,
        element_bytes=element_bytes,
        is_trained=parameter.is_trained and numel > 0,
        layer=parameter.layer,
        largest_axis=parameter.largest_axis,
        scales_bytes=scales_bytes,
        stored_bytes=stored_bytes,
    )


def _casts(job: Job, precision: Dtype) -> bool:
    built_in_shards = job.zero_stage == 3 and job.loads_sharded
    return job.engine == "deepspeed" and precision != "fp32" and not built_in_shards


@remembered(identities=1, size=256)
def trained(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Those that an optimizer updates."""
    return tuple(weight for weight in weights if weight.is_trained)


@remembered(identities=1, size=256)
def frozen(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Those that stay as they are."""
    return tuple(weight for weight in weights if not weight.is_trained)


def whole_terms(weights: Sequence[Weight]) -> Terms:
    """All weights, as the engine holds them, on one rank."""
    return {
        "frozen_weights": sum(weight.bytes + weight.scales_bytes for weight in frozen(weights)),
        "trained_weights": sum(weight.bytes for weight in trained(weights)),
    }


def stored_terms(weights: Sequence[Weight]) -> Terms:
    """All weights, as they were loaded, on one rank."""
    return {
        "frozen_weights": sum(weight.stored_bytes for weight in frozen(weights)),
        "trained_weights": sum(weight.stored_bytes for weight in trained(weights)),
    }


def sharded_terms(weights: Sequence[Weight], ranks: int) -> Terms:
    """One rank's parts when every weight is divided for itself; scales stay whole."""
    return {
        "frozen_weights": sum(weight.shard_bytes(ranks) + weight.scales_bytes for weight in frozen(weights)),
        "trained_weights": sum(weight.shard_bytes(ranks) for weight in trained(weights)),
    }


def pinned_bytes(size_bytes: int) -> int:
    """Host memory that a pinned buffer of this size takes: rounded up to a power of two.

    torch 2.13, ATen/core/CachingHostAllocator.h:302-305 (`PowerOf2Ceil`); freed blocks are kept for reuse.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0
