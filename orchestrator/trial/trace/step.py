"""One micro-step of a weightless model under the recorder."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orchestrator.contract.profile import Dtype, LossPath, Mark, Place, Point, StepPhase, TraceRequest
from orchestrator.trial.trace.autocast import autocast
from orchestrator.trial.trace.fused import fused_kernels
from orchestrator.trial.trace.kernels import device_kernels
from orchestrator.trial.trace.losses import fused_linear_loss
from orchestrator.trial.trace.recorder import Recorder, Recording, no_garbage_collection

_LAYER = re.compile(r"\.(?:layers?|h|blocks?|decoder_layers)\.(\d+)\.")


@dataclass(frozen=True)
class Weights:
    """The model's weights, tied ones once, and the modules that hold them, in the order of the model."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    layers: tuple[int, ...]
    modules: tuple[tuple[str, nn.Module, tuple[int, ...]], ...]


def weights_of(model: nn.Module) -> Weights:
    """All weights of `model`."""
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    layers: list[int] = []
    modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    index: dict[int, int] = {}
    for path, module in model.named_modules():
        own = []
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in index:
                index[id(parameter)] = len(names)
                full = f"{path}.{name}" if path else name
                found = _LAYER.search(full)
                names.append(full)
                parameters.append(parameter)
                layers.append(int(found.group(1)) if found else -1)
            own.append(index[id(parameter)])
        if own:
            modules.append((path, module, tuple(own)))
    return Weights(tuple(names), tuple(parameters), tuple(layers), tuple(modules))


def record_step(model: nn.Module, weights: Weights, request: TraceRequest, point: Point) -> Recording:
    """Forward and backward pass of one micro-batch; weights and buffers are left out of the recording."""
    recorder = Recorder()
    for parameter in weights.parameters:
        parameter.grad = None
        recorder.ignore(parameter)
    for buffer in model.buffers():
        recorder.ignore(buffer)
    with ExitStack() as stack:
        stack.enter_context(no_garbage_collection())
        stack.enter_context(device_kernels(request))
        stack.enter_context(fused_kernels(model, request.kernels))
        stack.enter_context(_marks(recorder, model, weights, request.autocast))
        stack.enter_context(recorder)
        _run(recorder, model, request, point)
        for parameter in weights.parameters:
            if parameter.grad is not None:
                recorder.place(parameter.grad, Place.GRADIENT)
        recording = recorder.recording
        recorder.recording = Recording(list(recording.sizes_bytes), list(recording.places), list(recording.events))
    for parameter in weights.parameters:
        parameter.grad = None
    return recording


def _run(recorder: Recorder, model: nn.Module, request: TraceRequest, point: Point) -> None:
    with torch.device("meta"):
        shape = (point.micro_batch, point.sequence_tokens)
        inputs: dict[str, Any] = {"input_ids": torch.empty(shape, dtype=torch.int64)}
        labels_shape = shape[:1] if request.task == "sequence_classification" else shape
        inputs["labels"] = torch.empty(labels_shape, dtype=torch.int64)
        if request.is_padded:
            inputs["attention_mask"] = torch.empty(shape, dtype=torch.int64)
        for tensor in inputs.values():
            recorder.place(tensor, Place.INPUT)
        recorder.enter(StepPhase.FORWARD)
        with autocast(request.autocast):
            outputs = None
            if request.loss is LossPath.FUSED_LINEAR:
                loss = _fused(model, inputs)
            else:
                outputs = model(**inputs)
                loss = outputs.loss
        if not request.keeps_outputs:
            outputs = None
        recorder.enter(StepPhase.BACKWARD)
        loss.backward()
        del outputs, loss, inputs


def _fused(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return fused_linear_loss(base, inputs)


@contextmanager
def _marks(recorder: Recorder, model: nn.Module, weights: Weights, lower: Dtype | None) -> Iterator[None]:
    """Marks of modules and gradients, and the depth of running modules, while active."""
    hooks: list[Any] = []
    indices = {id(module): index for index, (_, module, _) in enumerate(weights.modules)}
    last_backward: list[int] = []

    recomputation = ExitStack()

    def before(module: nn.Module, args: Any) -> None:
        if recorder.phase is StepPhase.BACKWARD and recorder.module_depth == 0:
            # modes of functions are off in the backward pass, but a checkpoint computes under the forward's autocast
            recomputation.enter_context(autocast(lower))
        recorder.module_depth += 1
        index = indices.get(id(module))
        if index is not None:
            recorder.mark(Mark.BEFORE_FORWARD, index)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        recorder.module_depth -= 1
        if recorder.module_depth == 0:
            recomputation.close()
        index = indices.get(id(module))
        if index is None:
            return
        recorder.mark(Mark.AFTER_FORWARD, index)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: before_backward(index))

    def before_backward(index: int) -> None:
        if last_backward:
            recorder.mark(Mark.AFTER_BACKWARD, last_backward.pop())
        recorder.mark(Mark.BEFORE_BACKWARD, index)
        last_backward.append(index)

    def gradient_hook(number: int) -> Any:
        return lambda parameter: recorder.mark(Mark.GRADIENT, number)

    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after, always_call=True))
    for number, parameter in enumerate(weights.parameters):
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(gradient_hook(number)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if last_backward:
        recorder.mark(Mark.AFTER_BACKWARD, last_backward.pop())
