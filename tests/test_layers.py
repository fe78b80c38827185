"""The layers of the packages, and the lightness of the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_import_layers_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_asking_for_help_loads_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import json, sys\nsys.argv[1:] = json.loads(sys.argv[1])\nfrom orchestrator.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    loaded = set(json.loads(run.stdout.splitlines()[-1]))
    heavy = {
        "torch",
        "transformers",
        "peft",
        "deepspeed",
        "ray",
        "mlflow",
        "optuna",
        "plotly",
        "pandas",
        "numpy",
    }
    assert loaded & heavy == set()
