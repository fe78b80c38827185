"""What one optimizer step asks of one rank, whatever it runs on: operations, bytes, kernels, exchanges, copies."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import (
    DTYPE_BYTES,
    MONOMIALS,
    Dtype,
    LossPath,
    Mark,
    Parameter,
    Point,
    Profile,
    Quantization,
    StepPhase,
)
from orchestrator.contract.units import MIB
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.traffic import Collective, Transfer, bucketed_bytes, collectives, gathered_modules, transfers

Pass = Literal["forward", "recompute", "backward"]

_MASTER_BYTES = 4
_PACKED_BELOW_BYTES = 2
_IS_SQUARED = np.array([sequence == 2 for _, sequence, _ in MONOMIALS])
_HAS_RANK = np.array([rank > 0 for *_, rank in MONOMIALS])


@dataclass(frozen=True)
class Products:
    """FLOPs of one pass of one micro-step, by what they are."""

    step: Pass
    linear_flops: float
    adapter_flops: float
    """The part that grows with the adapter's rank."""
    fused_attention_flops: float
    """Pairs that the kernel computes: a causal one without a mask leaves half of them out."""
    plain_attention_flops: float
    """By two matrix products, which compute all pairs."""
    needed_attention_flops: float
    """Pairs that the model needs: half of them where it is causal."""

    @property
    def computed_flops(self) -> float:
        """All that the device computes."""
        attention_flops = self.fused_attention_flops + self.plain_attention_flops
        return self.linear_flops + self.adapter_flops + attention_flops


@dataclass(frozen=True)
class Streamed:
    """Bytes and kernels of one phase of one micro-step. Recomputation belongs to the backward phase."""

    born_bytes: float
    """Of all storages born: each kernel but a few writes one."""
    kernels: int
    weight_bytes: float
    """Weights that matrix products read."""
    fresh_bytes: float = 0.0
    """Of storages for which the allocator asks the system anew each time, which then maps every page at its first
    use."""


@dataclass(frozen=True)
class Update:
    """The optimizer's update of one rank's share. `touched_bytes` are read or written on the device, `host_bytes` on
    the host."""

    elements: float
    touched_bytes: float
    kernels: int
    host_bytes: float


@dataclass(frozen=True)
class StepWork:
    """One optimizer step of one rank. Products and streams are of one micro-step, all else of the whole step."""

    micro_steps: int
    world_size: int
    ranks_on_node: int
    padded_tokens: int
    """Of one micro-step of one rank, with padding."""
    compute_dtype: Dtype
    adapter_dtype: Dtype
    is_flash_attention: bool
    """By a fused kernel without a mask, in half precision."""
    products: tuple[Products, ...]
    forward: Streamed
    backward: Streamed
    hooked_modules: int
    """Modules around which an engine's Python code runs in every pass."""
    gathered_modules: int
    """Those of them whose weights it gathers and releases there."""
    passes: int
    """Over the modules in one micro-step: forward, backward, and forward again where activations are recomputed."""
    update: Update
    bucketed_bytes: float
    """Of gradients that pass through a bucket beside `collectives`, in the whole step."""
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    pin_memory: bool

    @property
    def model_flops(self) -> tuple[float, float]:
        """Linear and attention FLOPs of one micro-step, padding included, recomputation not."""
        needed = [product for product in self.products if product.step != "recompute"]
        linear = sum(product.linear_flops + product.adapter_flops for product in needed)
        return linear, sum(product.needed_attention_flops for product in needed)

    @property
    def hardware_flops(self) -> float:
        """FLOPs of one micro-step, padding and recomputation included."""
        return sum(item.computed_flops for item in self.products)


def step_work(profile: Profile, job: Job) -> StepWork:
    """All work of `job`. Costs some milliseconds for a 7B model, less where a part of it was asked for before."""
    return _work(profile, job)


@remembered(identities=1, size=4096)
def _work(profile: Profile, job: Job) -> StepWork:
    request = profile.request
    half_step = _streamed(profile, job.point)
    recomputes = request.gradient_checkpointing is Checkpointing.FULL
    return StepWork(
        micro_steps=job.gradient_accumulation,
        world_size=job.world_size,
        ranks_on_node=job.ranks_on_node,
        padded_tokens=job.point.micro_batch * job.point.sequence_tokens,
        compute_dtype=request.autocast or request.dtype,
        adapter_dtype=_adapter_dtype(profile, job),
        is_flash_attention=_is_flash(profile),
        products=tuple(_products(profile, job.point, step) for step in _passes(recomputes)),
        forward=half_step[StepPhase.FORWARD],
        backward=half_step[StepPhase.BACKWARD],
        hooked_modules=len(profile.modules) if job.engine == "deepspeed" and job.zero_stage == 3 else 0,
        gathered_modules=gathered_modules(profile, job),
        passes=3 if recomputes else 2,
        update=_update(profile, job),
        bucketed_bytes=bucketed_bytes(profile, job),
        collectives=tuple(collectives(profile, job)),
        transfers=tuple(transfers(profile, job)),
        pin_memory=job.pin_memory,
    )


def _is_flash(profile: Profile) -> bool:
    request = profile.request
    is_fused = request.attention == "flash_attention_2" or (request.attention == "sdpa" and not _has_mask(profile))
    return is_fused and (request.autocast or request.dtype) != "fp32"


def _passes(recomputes: bool) -> tuple[Pass, ...]:
    return ("forward", "recompute", "backward") if recomputes else ("forward", "backward")


@remembered(identities=1, size=256)
def _products(profile: Profile, point: Point, step: Pass) -> Products:
    """A trace counts all pairs of attention; eager attention's products are among the linear ones, and the only ones
    that grow with the sequence's square."""
    laws = [law for law in profile.flops if law.phase == step]
    coefficients = np.sum([law.coefficients for law in laws if law.kind == "linear"], axis=0) * point.monomials()
    fused = sum(law.at(point) for law in laws if law.kind == "attention")
    plain = float(coefficients[_IS_SQUARED].sum())
    adapter = float(coefficients[_HAS_RANK].sum())
    request = profile.request
    is_causal = request.task == "causal_lm"
    leaves_out = is_causal and (request.attention == "flash_attention_2" or not _has_mask(profile))
    return Products(
        step=step,
        linear_flops=float(coefficients.sum()) - plain - adapter + _fused_head_flops(profile, point, step),
        adapter_flops=adapter,
        fused_attention_flops=fused / 2 if leaves_out else fused,
        plain_attention_flops=plain,
        needed_attention_flops=(fused + plain) / 2 if is_causal else fused + plain,
    )


_HEADS = ("lm_head.weight", "embed_out.weight")
_FUSED_LOGITS_STORED = 2
"""By a fused loss: a chunk's logits, and their gradient in their place."""


def _head(profile: Profile) -> Parameter:
    """The output head's weight; where it is tied to the embedding, that one: the largest outside of the layers."""
    outside = [parameter for parameter in profile.parameters if parameter.layer < 0]
    named = [parameter for parameter in outside if parameter.name.endswith(_HEADS)]
    return max(named or outside, key=lambda parameter: parameter.numel_fixed)


def _fused_head_flops(profile: Profile, point: Point, step: Pass) -> float:
    """A trace has no products of a loss that is fused with the head, which makes logits and both gradients chunk by
    chunk (Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py). They are counted where autograd would."""
    if profile.request.loss is not LossPath.FUSED_LINEAR or step == "recompute":
        return 0.0
    head = _head(profile)
    times = 2 if step == "backward" and head.is_trained else 1
    return 2.0 * times * point.micro_batch * point.sequence_tokens * head.numel_fixed


def _fused_logits_bytes(profile: Profile, point: Point) -> float:
    if profile.request.loss is not LossPath.FUSED_LINEAR:
        return 0.0
    element_bytes = DTYPE_BYTES[profile.request.autocast or profile.request.dtype]
    logits = point.micro_batch * point.sequence_tokens * _head(profile).largest_axis
    return _FUSED_LOGITS_STORED * logits * element_bytes


def _has_mask(profile: Profile) -> bool:
    return profile.request.is_padded or profile.request.beyond_window


def _adapter_dtype(profile: Profile, job: Job) -> Dtype:
    """DeepSpeed casts adapters with all else; autocast casts their products; else they stay as peft made them."""
    request = profile.request
    if job.engine == "deepspeed":
        return request.dtype
    return request.autocast or request.adapter_dtype or "fp32"


@remembered(identities=1, size=256)
def _streamed(profile: Profile, point: Point) -> dict[StepPhase, Streamed]:
    """Births before and after the mark where the backward pass begins."""
    turn = len(profile.events)
    for position, mark, payload in profile.marks.tolist():
        if mark == Mark.PHASE and payload == StepPhase.BACKWARD:
            turn = position
            break
    sizes = profile.storage_bytes(point)
    weights = _weight_bytes(profile, point)
    recomputes = profile.request.gradient_checkpointing is Checkpointing.FULL
    found = {}
    for phase, events, reads in (
        (StepPhase.FORWARD, profile.events[:turn], 1),
        (StepPhase.BACKWARD, profile.events[turn:], 2 if recomputes else 1),
    ):
        born = events[events > 0] - 1
        fresh_bytes = _fresh_bytes(sizes[born]) if profile.request.device == "cpu" else 0.0
        fused_bytes = _fused_logits_bytes(profile, point) if phase is StepPhase.FORWARD else 0.0
        born_bytes = float(sizes[born].sum()) + fused_bytes
        found[phase] = Streamed(born_bytes, len(born), reads * weights, fresh_bytes)
    return found


_MAPPED_BYTES = 32 * MIB
"""glibc maps blocks of at least so much one by one and unmaps them when they are freed; below, its threshold follows
the largest block that was freed (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems)."""
_SOMETIMES_MAPPED_BYTES = 28 * MIB
"""Widths of batches vary round the mean that is priced: blocks above this are taken to pass the threshold in a part of
the steps that grows evenly. Assumed."""


def _fresh_bytes(sizes: NDArray[np.int64]) -> float:
    share = (sizes - _SOMETIMES_MAPPED_BYTES) / (_MAPPED_BYTES - _SOMETIMES_MAPPED_BYTES)
    return float((sizes * np.clip(share, 0.0, 1.0)).sum())


_GPTQ_UNPACK_BYTES = 8.5
"""Of one weight, by the kernel that writes a GPTQ layer out in each pass: a thread an element reads the whole word of
eight weights, the scale and its share of a word of zeros, and writes half precision: 4 + 2 + 0.5 + 2 bytes (ModelCloud
GPTQModel `nn_modules/triton_utils/dequant.py`, `dequant_kernel_248`; fms-acceleration has a copy)."""


def _weight_bytes(profile: Profile, point: Point) -> float:
    """Read by the products of one pass. A packed weight is read to write it out, which the stream has, and that copy is
    read again; GPTQ's writing out is not in the stream."""
    element_bytes = DTYPE_BYTES[profile.request.autocast or profile.request.dtype]
    unpacks_bytes = _GPTQ_UNPACK_BYTES if profile.request.quantization is Quantization.INT4 else 0.0
    read = 0.0
    for parameter in profile.parameters:
        is_packed = parameter.bytes_per_element < _PACKED_BELOW_BYTES
        packed = (unpacks_bytes or parameter.bytes_per_element) if is_packed else 0.0
        read += parameter.numel(point.lora_rank) * (element_bytes + packed)
    return read


def _update(profile: Profile, job: Job) -> Update:
    tensors, numel = _trained(profile, job.point.lora_rank)
    elements = numel / shards(job)
    if job.offload_optimizer != "none":
        return Update(elements, 0.0, 0, elements * _host_bytes_per_element(job))
    return Update(elements, elements * _device_bytes_per_element(profile, job), _update_kernels(job, tensors), 0.0)


@remembered(identities=1, size=256)
def _trained(profile: Profile, lora_rank: int) -> tuple[int, int]:
    """How many tensors are trained, and their elements."""
    numels = [parameter.numel(lora_rank) for parameter in profile.parameters if parameter.is_trained]
    return len(numels), sum(numels)


def shards(job: Job) -> int:
    """Into how many parts the optimizer's work is divided."""
    is_sharded = job.engine == "fsdp" or (job.engine == "deepspeed" and job.zero_stage > 0)
    return job.world_size if is_sharded else 1


_FUSED_PASSES = {"adamw": 7, "sgd": 3, "adafactor": 6, "adamw_8bit": 4}
"""Tensors read and written by one kernel of the update: AdamW reads weight, gradient and both states and writes all
but the gradient. Adafactor's factors are small: it squares, normalises and applies the gradient. 8-bit states are
half of a 16-bit tensor and quarter of a 32-bit one."""
_FOREACH_PASSES = {"adamw": 20, "sgd": 5, "adafactor": 12, "adamw_8bit": 4}
"""The same by a kernel for each operation: torch 2.13, torch/optim/adam.py, `_multi_tensor_adam`: 12 reads and 8
writes in mul, lerp, mul, addcmul, sqrt, div, add, addcdiv."""
_FOREACH_KERNELS = 8


def _device_bytes_per_element(profile: Profile, job: Job) -> float:
    weight_bytes = DTYPE_BYTES[profile.request.dtype]
    passes = _FUSED_PASSES if job.optimizer_loop == "fused" else _FOREACH_PASSES
    if job.master_dtype is None:
        return (passes[job.optimizer] + 1) * weight_bytes  # one more: the gradient's norm
    master_bytes = DTYPE_BYTES[job.master_dtype]
    # gradient to the master's type, its norm, the update, and the weights back
    copies = (weight_bytes + master_bytes) + master_bytes + (master_bytes + weight_bytes)
    return copies + passes[job.optimizer] * master_bytes


def _host_bytes_per_element(job: Job) -> float:
    """The update in fp32, the gradient scaled by its norm, the weight rounded into the buffer that goes back
    (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:3075-3097)."""
    scaled, rounded = 2 * _MASTER_BYTES, _MASTER_BYTES + 2
    return _FUSED_PASSES[job.optimizer] * _MASTER_BYTES + scaled + rounded


def _update_kernels(job: Job, tensors: int) -> int:
    """DeepSpeed's groups are flat: a tensor each. Plain torch launches by chunks of some hundred tensors, or by one."""
    flat = job.engine == "deepspeed"
    per_tensor = 1 if job.optimizer_loop == "fused" else _FOREACH_KERNELS
    if flat:
        return per_tensor
    return per_tensor * (tensors if job.optimizer_loop == "for_loop" else max(1, tensors // 100))
