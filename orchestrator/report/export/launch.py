"""`launch.sh` and `train.py`: the launch line, and the script that trains from the other files."""

import shlex
import textwrap
from importlib.resources import files

from orchestrator.report.export.measured import MeasuredTrial

LAUNCH_FILE = "launch.sh"
SCRIPT_FILE = "train.py"
_NAME_FIRST_NODE = (
    'if [ "${{NNODES:-{nodes}}}" -gt 1 ]; then : "${{RDZV_ENDPOINT:?measured on {nodes} nodes: start this on each of '
    'them with RDZV_ENDPOINT=first-node:29400}}"; fi'
)


def launch_script(trial: MeasuredTrial) -> str:
    """A bash script that starts `train.py` on as many ranks as were measured, in the same environment."""
    world_size, nodes = trial.config.world_size, trial.nodes
    variables = {**trial.resolved.environment, "OMP_NUM_THREADS": str(trial.measurement.threads_per_rank)}
    if trial.measurement.device == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    lines = ["#!/usr/bin/env bash", *_comment(trial)]
    lines += [
        "#",
        *_usage(world_size, nodes),
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        *([_NAME_FIRST_NODE.format(nodes=nodes)] if nodes > 1 else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        'if [ -n "${RDZV_ENDPOINT:-}" ]; then',
        f'    rendezvous=(--rdzv-id "{trial.sweep.name}-{trial.record.trial}" --rdzv-backend c10d'
        ' --rdzv-endpoint "$RDZV_ENDPOINT")',
        "else",
        "    rendezvous=(--standalone)",
        "fi",
        'exec "${PYTHON:-python}" -m torch.distributed.run --nnodes'
        f' "${{NNODES:-{nodes}}}" --nproc-per-node "${{NPROC_PER_NODE:-{world_size // nodes}}}" "${{rendezvous[@]}}"'
        f' {SCRIPT_FILE} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _usage(world_size: int, nodes: int) -> list[str]:
    """How to start it where it was measured, and elsewhere."""
    several = nodes if nodes > 1 else 2
    each = f"NNODES={several} NPROC_PER_NODE={max(1, world_size // several)} "
    one = "" if nodes == 1 else f"NNODES=1 NPROC_PER_NODE={world_size} "
    return [
        f"# One node: {one}bash {LAUNCH_FILE} [--max-steps N] [--output FOLDER]",
        f"# Several: on each of them, {each if nodes == 1 else ''}RDZV_ENDPOINT=first-node:29400 bash {LAUNCH_FILE}",
    ]


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
