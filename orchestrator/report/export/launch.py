"""`launch.sh` and `train.py`: the launch line, and the script that trains from the other files."""

import shlex
import textwrap
from importlib.resources import files

from orchestrator.report.export.measured import MeasuredTrial

LAUNCH_FILE = "launch.sh"
SCRIPT_FILE = "train.py"


def launch_script(trial: MeasuredTrial) -> str:
    """A bash script that starts `train.py` on as many ranks as were measured, in the same environment."""
    world_size = trial.config.world_size
    variables = {**trial.resolved.environment, "OMP_NUM_THREADS": str(trial.config.threads_per_rank)}
    if trial.measurement.device == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    lines = ["#!/usr/bin/env bash", *_comment(trial)]
    lines += [
        "#",
        f"# One node: bash {LAUNCH_FILE} [--max-steps N] [--output FOLDER]",
        f"# Several: on each of them, NNODES=2 NPROC_PER_NODE={max(1, world_size // 2)} RDZV_ENDPOINT=first-node:29400"
        f" bash {LAUNCH_FILE}",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        'if [ -n "${RDZV_ENDPOINT:-}" ]; then',
        f'    rendezvous=(--rdzv-id "{trial.sweep.name}-{trial.record.trial}" --rdzv-backend c10d'
        ' --rdzv-endpoint "$RDZV_ENDPOINT")',
        "else",
        "    rendezvous=(--standalone)",
        "fi",
        'exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "${NNODES:-1}"'
        f' --nproc-per-node "${{NPROC_PER_NODE:-{world_size}}}" "${{rendezvous[@]}}" {SCRIPT_FILE} "$@"',
    ]
    return "\n".join(lines) + "\n"


def training_script(trial: MeasuredTrial) -> str:
    """The same script for every trial under its own header."""
    header = "\n".join(_comment(trial))
    return f"{header}\n{(files('orchestrator.report.export') / 'train.py.j2').read_text()}"


def _comment(trial: MeasuredTrial) -> list[str]:
    """The header as lines of a script."""
    return [
        part
        for line in trial.header()
        for part in textwrap.wrap(line, 118, initial_indent="# ", subsequent_indent="#   ")
    ]
