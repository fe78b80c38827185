"""Runs the preflight of model and data in a process of its own, and keeps what it found by content."""

import os
import platform
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock
from pydantic import JsonValue

from orchestrator.contract.config import content_hash
from orchestrator.contract.errors import BrimfulError, PreflightError
from orchestrator.contract.facts import (
    FACTS_FILE,
    FAILURE_FILE,
    REQUEST_FILE,
    Facts,
    PreflightFailure,
    PreflightRequest,
)
from orchestrator.contract.handoff import read_model, write_atomic
from orchestrator.placement.environment import template_environment
from orchestrator.placement.hub import hub_answers, needs_hub
from orchestrator.placement.local_devices import gpus
from orchestrator.space.request import preflight_request
from orchestrator.spec.catalog import hint
from orchestrator.spec.hardware import lookup
from orchestrator.spec.sweep import SweepSpec

LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "datasets", "brimful")
"""Whose versions decide whether an earlier preflight still holds."""
_LOG_FILE = "preflight.log"
_DATA_FOLDER = "data"
_CHUNK_BYTES = 2**20


def preflight(spec: SweepSpec, spec_path: str, cache: Path, threads_per_rank: int) -> Facts:
    """What the model, the data and the device turn out to be; kept under `cache` by content.

    Raises PreflightError, naming the place in the spec, when the model or the data cannot be used.
    """
    request = preflight_request(spec, cache / _DATA_FOLDER, threads_per_rank)
    folder = (cache / "preflight" / _preflight_key(request)).absolute()
    request = request.model_copy(update={"data_directory": str(folder / _DATA_FOLDER)})
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not _is_prepared(folder):
            _run_preflight(request, folder, spec_path)
    facts = read_model(folder / FACTS_FILE, Facts)
    # the cache may have been moved since
    data = facts.data.model_copy(update={"directory": str(folder / _DATA_FOLDER)})
    return _with_known_peak(facts.model_copy(update={"data": data}))


def _is_prepared(folder: Path) -> bool:
    return (folder / FACTS_FILE).is_file() and (folder / _DATA_FOLDER / "data.json").is_file()


def _preflight_key(request: PreflightRequest) -> str:
    """Identity of all that the findings depend on: the request, the files it names, the libraries and the machine."""
    files: dict[str, JsonValue] = {}
    for path in (request.model.path, request.data.path, request.data.tokenizer):
        if path is not None and Path(path).exists():
            files[path] = _file_identity(Path(path))
    return content_hash(
        {
            "request": request.model_dump(mode="json", exclude={"data_directory"}),
            "files": files,
            "versions": {name: version(name) for name in LIBRARIES},
            "machine": platform.node(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
    )


def _file_identity(path: Path) -> JsonValue:
    """A file by its content; a folder by the names, sizes and times of its files, since it may hold huge weights."""
    if path.is_dir():
        entries = [(str(file.relative_to(path)), file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
        return [[name, status.st_size, status.st_mtime_ns] for name, status in entries]
    digest = sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _run_preflight(request: PreflightRequest, folder: Path, spec_path: str) -> None:
    (folder / FAILURE_FILE).unlink(missing_ok=True)
    write_atomic(folder / REQUEST_FILE, request.model_dump_json(indent=1))
    visible = [gpu.visible for gpu in gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))]
    environment = template_environment(os.environ, visible[0] if visible else None, request.threads_per_rank)
    if needs_hub(request) and not hub_answers(environment):
        environment["HF_HUB_OFFLINE"] = "1"
    log = folder / _LOG_FILE
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "orchestrator.trial.preflight", str(folder)]
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, check=False
        )
    if (folder / FAILURE_FILE).is_file():
        failure = read_model(folder / FAILURE_FILE, PreflightFailure)
        known = hint(request.model.id) if failure.field == "model.id" and request.model.id is not None else ""
        raise PreflightError(f"{spec_path}: {failure.field}: {failure.message}{known}")
    if status.returncode != 0 or not _is_prepared(folder):
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise BrimfulError(f"the preflight of model and data ended with code {status.returncode}: {last} (log: {log})")


def _with_known_peak(facts: Facts) -> Facts:
    """On GPUs the data sheet's dense figures, where the card is in the table."""
    device = lookup(facts.device_name) if facts.device == "cuda" else None
    if device is None:
        return facts
    source = f"the dense peak of {device.key} ({device.source})"
    return facts.model_copy(update={"peak_flops_per_s": device.peak_flops_per_s, "peak_source": source})
