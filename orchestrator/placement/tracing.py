"""Runs traces in processes of their own, and keeps each profile by its content."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock
from pydantic import JsonValue

from orchestrator.contract.config import content_hash
from orchestrator.contract.errors import PreflightError
from orchestrator.contract.handoff import read_model, write_atomic
from orchestrator.contract.profile import (
    PROFILE_FILE,
    TRACE_FAILURE_FILE,
    TRACE_FILE,
    Profile,
    TraceFailure,
    TraceRequest,
    read_profile,
)
from orchestrator.placement.hub import hub_answers

LIBRARIES = ("torch", "transformers", "peft")
"""Whose versions decide whether an earlier trace still holds."""
_LOG_FILE = "trace.log"
_BATCH = 8
"""Traces in one process, which saves the others the import of PyTorch and transformers."""
_TIMEOUT_S = 600.0
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Untraceable(PreflightError):
    """No profile can be made of a structure; the text says why."""


def trace(request: TraceRequest, cache: Path) -> Profile:
    """The profile of `request`, from `cache` or made anew. Raises Untraceable."""
    found = trace_all([request], cache)[request_key(request)]
    if isinstance(found, Untraceable):
        raise found
    return found


def trace_all(
    requests: Iterable[TraceRequest],
    cache: Path,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Profile | Untraceable]:
    """Profiles by `request_key`, or why there is none. `progress` is told how many of the new traces are done, first
    that none is."""
    wanted = {request_key(request): request for request in requests}
    folders = {key: (cache / "traces" / key).absolute() for key in wanted}
    on_hub = [key for key, request in wanted.items() if request.model.id is not None]
    for key in on_hub:
        # what the hub refused once it may give today
        (folders[key] / TRACE_FAILURE_FILE).unlink(missing_ok=True)
    missing = [key for key in wanted if not _is_done(folders[key])]
    environment = {**os.environ, **_ENVIRONMENT}
    if set(on_hub) & set(missing) and not hub_answers(environment):
        environment["HF_HUB_OFFLINE"] = "1"
    for key in missing:
        folders[key].mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(folders[key] / TRACE_FILE, wanted[key].model_dump_json(indent=1))
    size = max(1, min(_BATCH, -(-len(missing) // processes)))
    batches = [missing[start : start + size] for start in range(0, len(missing), size)]
    done = 0
    if missing:
        progress(done, len(missing))
    with ThreadPoolExecutor(processes) as pool:
        for batch in pool.map(lambda keys: _run([folders[key] for key in keys], environment), batches):
            done += batch
            progress(done, len(missing))
    return {key: _outcome(folder) for key, folder in folders.items()}


def request_key(request: TraceRequest) -> str:
    """Identity by content: the structure, the model's files and the libraries."""
    content = request.model_dump(mode="json")
    path = request.model.path
    if path is not None:
        config = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        content["file"] = config.read_text(errors="replace") if config.is_file() else None
    versions: JsonValue = {name: version(name) for name in LIBRARIES}
    return content_hash({"request": content, "versions": versions, "code": _code_digest()})


@functools.cache
def _code_digest() -> str:
    """Of the tracer's own source, so that a profile never outlives a change of it."""
    root = Path(__file__).resolve().parent.parent
    files = [*sorted((root / "trial" / "trace").glob("*.py")), root / "contract" / "profile.py"]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _is_done(folder: Path) -> bool:
    return (folder / PROFILE_FILE).is_file() or (folder / TRACE_FAILURE_FILE).is_file()


def _run(folders: list[Path], environment: Mapping[str, str]) -> int:
    """Trace `folders` in one process; what it leaves undone, because one trace ended it, runs alone."""
    with FileLock(folders[0] / "lock"):
        _run_process(folders, environment)
        for folder in folders if len(folders) > 1 else ():
            if not _is_done(folder):
                _run_process([folder], environment)
    return len(folders)


def _run_process(folders: list[Path], environment: Mapping[str, str]) -> None:
    undone = [folder for folder in folders if not _is_done(folder)]
    if not undone:
        return
    command = [sys.executable, "-m", "orchestrator.trial.trace", *map(str, undone)]
    with (undone[0] / _LOG_FILE).open("wb") as log:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                check=False,
                timeout=_TIMEOUT_S * len(undone),
            )
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {_TIMEOUT_S * len(undone):.0f} s\n".encode())


def _outcome(folder: Path) -> Profile | Untraceable:
    if (folder / PROFILE_FILE).is_file():
        return read_profile(folder / PROFILE_FILE)
    if (folder / TRACE_FAILURE_FILE).is_file():
        failure = read_model(folder / TRACE_FAILURE_FILE, TraceFailure)
        return Untraceable(f"{failure.field}: {failure.message}")
    log = folder / _LOG_FILE
    text = log.read_text(errors="replace").strip() if log.is_file() else ""
    last = (text.splitlines() or ["it said nothing"])[-1]
    return Untraceable(f"the trace of the model ended without a result: {last} (log: {log})")
