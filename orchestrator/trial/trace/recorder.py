"""Records storages being born and freed, matrix FLOPs, and marks, while PyTorch code runs on tensors without data."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from orchestrator.contract.profile import Mark, Place, StepPhase

aten = torch.ops.aten

_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_ATTENTION = frozenset(
    {
        *_CPU_ATTENTION,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
    }
)

Kind = Literal["linear", "attention"]


def _grouped_flops(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> int:
    """Rows of all groups together pass one product each; PyTorch's own counter leaves grouped products out."""
    groups = first.shape[0] if first.dim() == 3 and second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


@dataclass
class Recording:
    """What one run made: raw bytes of each storage, the order of births and deaths, marks and operations."""

    sizes_bytes: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, Mark, int]] = field(default_factory=list)
    flops: list[tuple[str, Kind, int]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """While active, notes every storage that an operation makes. Storages that are ignored belong to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.phase = StepPhase.FORWARD
        self.module_depth = 0
        """How many modules' forward functions are running: above 0 in the backward pass, it is a recomputation."""
        self._known: dict[int, int | None] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._born_in: list[StepPhase] = []
        self._is_recomputed: list[bool] = []

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave out the storage of `tensor`, which must outlive the recording."""
        self._known[tensor.untyped_storage()._cdata] = None

    def storage_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the tensor's storage; None if it is ignored or was never seen."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def note(self, tensor: torch.Tensor) -> None:
        """Record the storage of `tensor` unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        index = len(self.recording.sizes_bytes)
        self._known[key] = index
        self._alive[index] = weakref.ref(storage, lambda _: self._free(key, index))
        self.recording.sizes_bytes.append(storage.nbytes())
        self._born_in.append(self.phase)
        self._is_recomputed.append(self.phase is StepPhase.BACKWARD and self.module_depth > 0)
        self.recording.places.append(Place.TEMPORARY)
        self.recording.events.append(index + 1)

    def _free(self, key: int, index: int) -> None:
        del self._known[key]
        del self._alive[index]
        self.recording.events.append(-(index + 1))
        if self.recording.places[index] is not Place.TEMPORARY:
            return
        born_in = self._born_in[index]
        outlives_forward = born_in is StepPhase.FORWARD and self.phase is StepPhase.BACKWARD
        if outlives_forward or (self._is_recomputed[index] and self.module_depth == 0):
            self.recording.places[index] = Place.ACTIVATION

    def mark(self, mark: Mark, payload: int) -> None:
        """Write a mark before the next event."""
        self.recording.marks.append((len(self.recording.events), mark, payload))

    def enter(self, phase: StepPhase) -> None:
        """Begin a phase."""
        self.phase = phase
        self.mark(Mark.PHASE, int(phase))

    def place(self, tensor: torch.Tensor, place: Place) -> None:
        """Say what the storage of `tensor` is for."""
        index = self.storage_of(tensor)
        if index is not None:
            self.recording.places[index] = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = func._overloadpacket
        formula = _CPU_ATTENTION.get(packet)
        if formula is not None:
            query, key, value = args[:3] if formula is sdpa_flop else args[1:4]
            shapes = (query.shape, key.shape, value.shape)
            amount = formula(*shapes) if formula is sdpa_flop else formula(args[0].shape, *shapes)
        elif packet is aten._grouped_mm:
            amount = _grouped_flops(*args, **kwargs)
        elif packet in flop_registry:
            amount = flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            return
        phase = self.phase.name.lower()
        if self.phase is StepPhase.BACKWARD and self.module_depth > 0:
            phase = "recompute"
        self.recording.flops.append((phase, "attention" if packet in _ATTENTION else "linear", amount))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Storages die by reference counts alone, so that their order does not depend on the collector's moments."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
