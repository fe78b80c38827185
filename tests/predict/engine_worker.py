"""One rank of real DeepSpeed engines that run one after another: `engine_worker.py DIR`.

`DIR/cases.json` lists trial configurations. For each of them the rank builds the model and the engine as a trial does,
runs two optimizer steps, and writes what it holds, by class and by unique storage, to `DIR/rank<N>.json`.
"""

import gc
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.contract.config import TrialConfig
from orchestrator.trial import engine as trial_engine
from orchestrator.trial.device import open_device
from orchestrator.trial.engine import build_engine, deepspeed_config, select_accelerator
from orchestrator.trial.group import Group, RankPlace
from orchestrator.trial.model import build_model

STEPS = 2
Storages = dict[int, int]


def storages(values: Iterable[Any]) -> Storages:
    """Bytes by address of every storage under the tensors in `values`."""
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.untyped_storage().nbytes():
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return found


def everything() -> Storages:
    """Every storage of a tensor that was made after the last `gc.freeze`."""
    gc.collect()
    return storages(thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor))


class Peak(TorchDispatchMode):
    """Highest bytes of the storages of `tensors`, while they live, and of all that are made while active."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.live_bytes = 0
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        self.start_bytes = self.peak_bytes = self.end_bytes = self.live_bytes

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        gc.collect()
        self.end_bytes = self.live_bytes

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or not storage.nbytes():
            return
        self._sizes[key] = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.live_bytes += storage.nbytes()

    def _drop(self, key: int) -> None:
        del self._alive[key]
        self.live_bytes -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                continue
            if leaf.untyped_storage()._cdata not in given:
                self._note(leaf)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out


def weights_held(model: nn.Module) -> tuple[Storages, Storages]:
    """Weights (shards in stage 3), and what is gathered from them."""
    parameters = list(model.parameters())
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_tensor")]
    weights = storages([*(parameter.data for parameter in whole), *(parameter.ds_tensor for parameter in sharded)])
    return weights, storages(parameter.data for parameter in sharded)


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups"):
        groups = getattr(optimizer, name, None)
        if groups is not None:
            return [tensor for group in groups for tensor in (group if isinstance(group, list) else [group])]
    return []


def states_of(optimizer: Any) -> list[torch.Tensor]:
    state = getattr(optimizer, "optimizer", optimizer).state
    return [value for states in state.values() for value in states.values()]


def buckets_of(optimizer: Any) -> list[torch.Tensor]:
    found = []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        found += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    return found


def held(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes by class after a step; `other` is every tensor in no class."""
    weights, gathered = weights_held(model)
    masters = masters_of(optimizer)
    classes: dict[str, Storages] = {
        "weights": weights,
        "gathered_weights": gathered,
        "master_weights": storages(masters),
        "optimizer_states": storages(states_of(optimizer)),
        "gradients": storages(
            [getattr(optimizer, "grad_partitions_flat_buffer", None), *(master.grad for master in masters)]
        ),
        "reduce_buckets": storages(
            [
                *buckets_of(optimizer),
                getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None),
            ]
        ),
        "host_buffers": storages(
            [
                getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None),
                *getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", []),
                *getattr(optimizer, "accumulated_grads_in_cpu", {}).values(),
            ]
        ),
        "buffers": storages(model.buffers()),
    }
    seen: Storages = {}
    result = {}
    for name, found in classes.items():
        result[name] = sum(size for address, size in found.items() if address not in seen)
        seen |= found
    others = {address: size for address, size in everything().items() if address not in seen}
    result["other"] = sum(others.values())
    return result


def gradients_of(model: nn.Module, optimizer: Any) -> list[Any]:
    """Gradients and buckets, wherever an optimizer keeps them."""
    lists = getattr(optimizer, "all_grad_tensors", None) or {}
    return [
        *(parameter.grad for parameter in model.parameters()),
        *buckets_of(optimizer),
        getattr(optimizer, "grads_in_partition", None),
        *(tensor for tensors in lists.values() for tensor in tensors or []),
        *(tensor for tensors in getattr(optimizer, "averaged_gradients", {}).values() for tensor in tensors or []),
    ]


def open_gradients(model: nn.Module, optimizer: Any) -> int:
    """Bytes of gradients and buckets that are not there between steps."""
    kept = storages([getattr(optimizer, "grad_partitions_flat_buffer", None)])
    if kept:
        kept |= storages(buckets_of(optimizer))
    found = storages(gradients_of(model, optimizer))
    return sum(size for address, size in found.items() if address not in kept)


@contextmanager
def watched_gathers(model: nn.Module, log: list[list[Any]]) -> Iterator[None]:
    """Note each call that gathers or releases weights and the bytes that are gathered after it."""
    indices = {id(module): number for number, module in enumerate(model.modules())}
    fetch, release = (
        PartitionedParameterCoordinator.fetch_sub_module,
        PartitionedParameterCoordinator.release_sub_module,
    )

    def note(coordinator: Any, kind: str, module: nn.Module, forward: bool) -> None:
        registry = coordinator._PartitionedParameterCoordinator__inflight_param_registry
        flat = []
        for handle in registry.values():
            for each in getattr(handle, "handles", [handle]):
                flat += getattr(each, "partitions", None) or []
        whole = [parameter.data for parameter in model.parameters() if not parameter.ds_persist]
        index = indices[id(module)]
        log.append([f"{kind} {'forward' if forward else 'backward'}", index, sum(storages([*flat, *whole]).values())])

    def watched_fetch(coordinator: Any, module: nn.Module, forward: bool) -> None:
        fetch(coordinator, module, forward)
        note(coordinator, "before", module, forward)

    def watched_release(coordinator: Any, module: nn.Module, forward: bool = False) -> None:
        release(coordinator, module, forward)
        note(coordinator, "after", module, forward)

    PartitionedParameterCoordinator.fetch_sub_module = watched_fetch
    PartitionedParameterCoordinator.release_sub_module = watched_release
    try:
        yield
    finally:
        PartitionedParameterCoordinator.fetch_sub_module = fetch
        PartitionedParameterCoordinator.release_sub_module = release


def gathered_for(module: nn.Module) -> list[nn.Parameter]:
    """Own weights, and others that its forward function reads: a LoRA layer asks for the type of its A matrix."""
    others = [parameter for _, parameter in getattr(module, "ds_external_parameters", list)()]
    return list(dict.fromkeys([*module.parameters(recurse=False), *others]))


def run_case(config: TrialConfig, device: Any, place: RankPlace) -> dict[str, Any]:
    """Build, train two optimizer steps, tell."""
    resolved = deepspeed_config(config, pin_memory=False)
    loaded = build_model(config, resolved, torch.device("cpu"))
    model = loaded.model
    named = list(model.named_parameters())
    weights_loaded, _ = weights_held(model)
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    parameters = [
        {
            "name": name,
            "numel_fixed": int(getattr(parameter, "ds_numel", parameter.numel())),
            "bytes_per_element": parameter.element_size(),
            "is_trained": parameter.requires_grad,
        }
        for name, parameter in named
    ]
    with Peak(getattr(parameter, "ds_tensor", parameter.data) for _, parameter in named) as init:
        engine = build_engine(model, config, resolved, device).engine
    order: list[int] = []
    timelines: list[list[int]] = []

    def note_gradient(parameter: nn.Parameter) -> None:
        order.append(numbers[id(parameter)])
        timelines[-1].append(open_gradients(model, engine.optimizer))

    for _, parameter in named:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note_gradient)
    gathers: list[list[Any]] = []
    calls: list[list[Any]] = []
    between = 0
    torch.manual_seed(place.rank)
    for step in range(STEPS):
        for micro_step in range(config.gradient_accumulation):
            ids = torch.randint(0, 500, (config.knobs.micro_batch, 16))
            order.clear()
            timelines.append([])
            gathers = []
            with watched_gathers(model, gathers):
                loss = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
                engine.backward(loss)
            calls = gathers
            del loss
            if step == 1 and micro_step == 0 and config.gradient_accumulation > 1:
                between = open_gradients(model, engine.optimizer)
            if step + 1 < STEPS or micro_step + 1 < config.gradient_accumulation:
                engine.step()
    with Peak(gradients_of(model, engine.optimizer)) as optimizer_step:
        engine.step()
    result = {
        "parameters": parameters,
        "modules": [[numbers[id(parameter)] for parameter in gathered_for(module)] for module in model.modules()],
        "held": held(model, engine.optimizer),
        "gradient_order": list(order),
        "gradient_timelines": timelines[-config.gradient_accumulation :],
        "between": between,
        "loaded": sum(weights_loaded.values()),
        "init": init.peak_bytes - init.start_bytes,
        "step": optimizer_step.peak_bytes - optimizer_step.end_bytes,
        "gathers": calls if config.knobs.zero_stage == 3 else [],
        "optimizer": type(engine.optimizer).__name__,
    }
    engine.destroy()
    return result


def main(directory: Path) -> None:
    # it allocates for a moment to fail early under a limit, which no rank has here
    trial_engine.require_gloo_room = lambda: None
    configs = [TrialConfig.model_validate(case) for case in json.loads((directory / "cases.json").read_text())]
    place = RankPlace.from_environment()
    device = open_device(configs[0], place)
    select_accelerator(device)
    group = Group(place, device.backend, 120.0)
    results = []
    for config in configs:
        gc.collect()
        gc.freeze()  # what the libraries and earlier engines hold is not looked at again
        results.append(run_case(config, device, place))
    (directory / f"rank{place.rank}.json").write_text(json.dumps(results))
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
