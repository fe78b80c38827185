"""The real template, whose rank suffers what the file `fault` in its folder names. Only libraries are patched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.trial.preload import restart_with_environment
from orchestrator.trial.template import serve


def dead_adapter(suffix: str) -> None:
    """Adapters of the layers whose name ends with `suffix` take no part in the forward pass."""
    from peft.tuners.lora import layer
    from peft.tuners.lora.model import LoraModel

    create, forward = LoraModel._create_and_replace, layer.Linear.forward

    def remember_name(self: Any, *arguments: Any, current_key: str, **named: Any) -> None:
        create(self, *arguments, current_key=current_key, **named)
        self.model.get_submodule(current_key).adapted_name = current_key

    def skip_adapter(self: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        if self.adapted_name.endswith(suffix):
            return self.base_layer(x)
        return forward(self, x, *arguments, **named)

    LoraModel._create_and_replace = remember_name
    layer.Linear.forward = skip_adapter


def reentrant_checkpointing() -> None:
    """Checkpointing as it was once common: reentrant, and the frozen inputs require no gradient."""
    from transformers import PreTrainedModel

    enable = PreTrainedModel.gradient_checkpointing_enable
    PreTrainedModel.gradient_checkpointing_enable = lambda self, **_: enable(
        self, gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    PreTrainedModel.enable_input_require_grads = lambda self: None


def nan_loss() -> None:
    """The loss becomes NaN in the third forward pass."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    forward, calls = LlamaForCausalLM.forward, []

    def poisoned(self: Any, *arguments: Any, **named: Any) -> Any:
        output = forward(self, *arguments, **named)
        calls.append(None)
        if len(calls) >= 3:
            output.loss = output.loss * float("nan")
        return output

    LlamaForCausalLM.forward = poisoned


def keeps_tensors() -> None:
    """Each forward pass leaves 4 MiB in a list, as a loop that collects losses with their graphs does."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    forward, kept = LlamaForCausalLM.forward, []

    def collecting(self: Any, *arguments: Any, **named: Any) -> Any:
        kept.append(torch.ones(2**20))
        return forward(self, *arguments, **named)

    LlamaForCausalLM.forward = collecting


def dead_all() -> None:
    dead_adapter("")


def dead_values() -> None:
    dead_adapter("v_proj")


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        dead_all,
        dead_values,
        keeps_tensors,
        nan_loss,
        reentrant_checkpointing,
    )
}


def run_rank(directory: Path) -> int:
    from orchestrator.trial import guard

    fault = directory / "fault"
    if fault.exists():
        FAULTS[fault.read_text()]()
    return guard.run_rank(directory)


if __name__ == "__main__":
    restart_with_environment()
    serve(run_rank)
