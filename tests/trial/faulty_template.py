"""The real template, whose rank suffers what the file `fault` in its folder names. Only libraries are patched."""

import os
import subprocess
import sys
import time
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


def leave_grandchild() -> None:
    """A grandchild in a session of its own that outlives its parent."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    Path(os.environ["FAULT_DIRECTORY"], "grandchild").write_bytes(printed)


def leave_forks() -> None:
    """Two forks that never became another program and left the session."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)


def sleep_for_ever() -> None:
    leave_grandchild()
    time.sleep(600)


def flood_log() -> None:
    line = b"x" * 1023 + b"\n"
    os.write(2, b"first line\n")
    for _ in range(15_000):
        os.write(2, line)
    os.write(2, b"last line\n")


def dead_all() -> None:
    dead_adapter("")


def dead_values() -> None:
    dead_adapter("v_proj")


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        dead_all,
        dead_values,
        flood_log,
        leave_forks,
        leave_grandchild,
        nan_loss,
        reentrant_checkpointing,
        sleep_for_ever,
    )
}


def run_rank(directory: Path) -> int:
    from orchestrator.trial import guard

    fault = directory / "fault"
    if fault.exists():
        os.environ["FAULT_DIRECTORY"] = str(directory)
        FAULTS[fault.read_text()]()
    return guard.run_rank(directory)


if __name__ == "__main__":
    restart_with_environment()
    serve(run_rank)
