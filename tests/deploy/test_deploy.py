"""Each file to deploy with passes its own validator, as far as one exists without an engine."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
KUBERAY = sorted((ROOT / "clusters" / "kuberay").glob("*.yaml"))
COMPOSE = shutil.which("docker-compose")


def _run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )


def test_the_dockerfile_is_clean() -> None:
    run = _run(BIN / "hadolint", ROOT / "docker" / "Dockerfile")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_batch_script_is_clean() -> None:
    run = _run(BIN / "shellcheck", ROOT / "clusters" / "slurm" / "sweep.sbatch")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.stem)
def test_kuberay_accepts_the_resources(path: Path) -> None:
    """The schemas are those of KubeRay feeaf72 (2026-08-19), unknown fields forbidden."""
    schemas = json.loads(gzip.decompress((Path(__file__).parent / "kuberay.json.gz").read_bytes()))
    checked = 0
    for resource in yaml.safe_load_all(path.read_text()):
        if resource["apiVersion"] == "ray.io/v1":
            jsonschema.validate(resource, schemas[resource["kind"]])
            checked += 1
    assert checked == 1


@pytest.mark.skipif(COMPOSE is None, reason="needs Debian's docker-compose")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_compose_resolves_the_services(files: list[str], tmp_path: Path) -> None:
    chosen = [word for name in files for word in ("-f", ROOT / "docker" / name)]
    run = _run(str(COMPOSE), *chosen, "config")
    assert run.returncode == 0, run.stderr
    services = yaml.safe_load(run.stdout)["services"]
    assert set(services) == {"head", "worker", "postgres", "mlflow"}
    assert services["mlflow"]["ports"] == ["127.0.0.1:5000:5000/tcp"], "of this machine alone"


def test_ray_up_accepts_the_cluster() -> None:
    config = yaml.safe_load((ROOT / "clusters" / "ray-up" / "aws-2xp4d.yaml").read_text())
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config({**config, "max_workers": "two"}))


STUB_SRUN = '#!/bin/sh\nshift\nexec "$@"\n'
STUB_RAY = '#!/bin/sh\nshift 5\n[ "$1" = "--" ] && shift\nexec "$@"\n'
STUB_BRIMFUL = """#!/bin/sh
trap 'kill $sleeper; exit 143' TERM
token=$RAY_AUTH_TOKEN_PATH
echo "brimful $*; mode $RAY_AUTH_MODE; token of $(wc -c <"$token") bytes, $(stat -c %a "$token")"
[ "$2" = quick.yaml ] && exit 3
sleep 60 >/dev/null & sleeper=$!
wait $sleeper
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An allocation of two nodes, by stubs for what Slurm and Ray bring."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text(f'PATH="{tmp_path}/bin:$PATH"\n')
    (tmp_path / "bin").mkdir()
    stubs = {
        "srun": STUB_SRUN,
        "ray": STUB_RAY,
        "brimful": STUB_BRIMFUL,
        "scontrol": "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        "BRIMFUL_VENV": str(tmp_path / "venv"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "20017",
    }


def test_the_batch_script_runs_the_sweep_and_hands_its_exit_code_on(slurm: dict[str, str], tmp_path: Path) -> None:
    run = _run("bash", ROOT / "clusters" / "slurm" / "sweep.sbatch", "quick.yaml", "budget.trials=4", env=slurm)
    assert run.returncode == 3, run.stderr
    assert run.stdout == (
        "brimful run quick.yaml --address node7:20017 budget.trials=4; mode token; token of 65 bytes, 600\n"
    )
    assert not list((tmp_path / ".brimful").iterdir()), "the token is gone"


def test_the_batch_script_hands_a_termination_to_the_driver(slurm: dict[str, str]) -> None:
    script = str(ROOT / "clusters" / "slurm" / "sweep.sbatch")
    with subprocess.Popen(
        ["bash", script, "long.yaml"], stdout=subprocess.PIPE, text=True, env={**os.environ, **slurm}
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("brimful run long.yaml")
        job.terminate()
        assert job.wait(timeout=30) == 143
