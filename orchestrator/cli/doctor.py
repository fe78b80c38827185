"""`doctor`: what a run needs, checked on this machine."""

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.text import Text

from orchestrator import wiring
from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen
from orchestrator.contract.errors import EXIT_FAILED, EXIT_OK, BrimfulError
from orchestrator.contract.units import GIB, MIB, format_bytes
from orchestrator.placement.local_devices import cpu_slots, gpus

LOW_DISK_BYTES = 5 * GIB
LOW_SHARED_MEMORY_BYTES = 64 * MIB
"""Docker's default; NCCL and Ray's object store want more."""
LOW_LOCKED_MEMORY_BYTES = 64 * MIB
IMPORT_DEADLINE_S = 180.0
_REASONS = {
    "transformers": "from_pretrained of 4.56 to 5.2 runs code of a checkpoint that is not trusted (CVE-2026-4372)",
    "torch": "torch.load of older ones runs code with weights_only (CVE-2026-24747)",
    "ray": "the dashboard of older ones lets web pages delete jobs (CVE-2026-27482)",
    "mlflow": "the job endpoints of older ones are open to everyone (CVE-2026-0545)",
}
_STYLES = {"ok": "green", "warning": "yellow", "blocking": "bold red"}


class Check(Frozen):
    """One finding. `mend` says what to do when it is not ok."""

    name: str
    state: Literal["ok", "warning", "blocking"]
    detail: str
    mend: str = ""


class Diagnosis(Frozen):
    """All findings."""

    is_ready: bool
    checks: tuple[Check, ...]


def examine(home: Path, address: str | None, tracking_uri: str | None, pool: str | None, as_json: bool) -> int:
    """Print every finding; exit code 1 when one of them blocks a run."""
    output = Output(as_json)
    checks = []
    for check in _checks(home, address, tracking_uri, pool or wiring.DEFAULT_POOL):
        checks.append(check)
        line = Text(f"{check.state:9}", style=_STYLES[check.state])
        line.append(f" {check.name}: {check.detail}", style="default")
        output.show(line)
        if check.mend:
            output.show(f"          {check.mend}")
    is_ready = all(check.state != "blocking" for check in checks)
    output.document(Diagnosis(is_ready=is_ready, checks=tuple(checks)))
    output.show("Ready to run." if is_ready else "Not ready: see what is blocking above.")
    return EXIT_OK if is_ready else EXIT_FAILED


def _checks(home: Path, address: str | None, tracking_uri: str | None, pool: str) -> Iterator[Check]:
    yield _machine()
    yield from _versions()
    yield _training_libraries()
    yield _devices()
    yield _pool(pool, address)
    yield _home(home)
    yield _disk(home)
    yield _shared_memory()
    yield _locked_memory()
    yield _tracking(tracking_uri, home)


def _machine() -> Check:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, "
    return Check(
        name="machine",
        state="ok",
        detail=detail + f"{len(os.sched_getaffinity(0))} cores, {format_bytes(memory_bytes)} memory",
    )


def _versions() -> Iterator[Check]:
    """Every package that brimful names, against the range that it asks for."""
    fine = []
    for text in requires("brimful") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            mend = f"pip install '{requirement}'"
            yield Check(name=requirement.name, state="blocking", detail="is not installed", mend=mend)
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            fine.append(f"{requirement.name} {installed}")
            continue
        reason = _REASONS.get(requirement.name, "it was made and tested for those")
        yield Check(
            name=requirement.name,
            state="blocking",
            detail=f"{installed} is outside {requirement.specifier}: {reason}",
            mend=f"pip install '{requirement}'",
        )
    yield Check(name="packages", state="ok", detail=", ".join(fine))


def _training_libraries() -> Check:
    """They are imported in a process of their own: a broken build shows only there."""
    code = "import torch, transformers, peft, deepspeed; print(torch.__version__, torch.cuda.is_available())"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"torch, transformers, peft and deepspeed did not import within {IMPORT_DEADLINE_S:.0f} s"
        return Check(name="training libraries", state="blocking", detail=detail, mend="look at the disk's speed")
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        mend = "reinstall them as pyproject.toml says"
        return Check(name="training libraries", state="blocking", detail=f"do not import: {last}", mend=mend)
    torch_version, has_cuda = probe.stdout.split()[-2:]
    on = "CUDA" if has_cuda == "True" else "CPU only"
    return Check(name="training libraries", state="ok", detail=f"import; torch {torch_version} sees {on}")


def _devices() -> Check:
    found = gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    busy = [words for gpu in found for words in gpu.occupants]
    if busy:
        mend = "trials wait for free GPUs; end those processes or hide the GPUs with CUDA_VISIBLE_DEVICES"
        return Check(name="devices", state="warning", detail=f"{len(found)} GPUs, in use: {'; '.join(busy)}", mend=mend)
    if found:
        return Check(name="devices", state="ok", detail=f"{len(found)} GPUs")
    return Check(name="devices", state="ok", detail=f"no GPU; {len(cpu_slots(1))} CPU slots of one thread")


def _pool(name: str, address: str | None) -> Check:
    try:
        pool = wiring.build_pool(name, address)
    except BrimfulError as error:
        return Check(name=f"pool {name}", state="blocking", detail=str(error), mend="or run with --pool local")
    try:
        view = pool.cluster()
    except BrimfulError as error:
        return Check(name=f"pool {name}", state="blocking", detail=str(error))
    finally:
        pool.close()
    free = sum(node.free_devices for node in view.nodes if node.is_alive)
    detail = f"{len(view.nodes)} nodes with {view.devices} x {view.device_kind}, {free} free"
    return Check(name=f"pool {name}", state="ok" if free else "warning", detail=detail)


def _home(home: Path) -> Check:
    place = _existing(home)
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        mend = "choose another folder with --home or BRIMFUL_HOME"
        detail = f"{place} cannot be written: {error.strerror}"
        return Check(name="home", state="blocking", detail=detail, mend=mend)
    return Check(name="home", state="ok", detail=f"{home.absolute()} can be written")


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _disk(home: Path) -> Check:
    free_bytes = shutil.disk_usage(_existing(home)).free
    detail = f"{format_bytes(free_bytes)} free for the home folder"
    if free_bytes >= LOW_DISK_BYTES:
        return Check(name="disk", state="ok", detail=detail)
    return Check(
        name="disk", state="warning", detail=detail, mend="prepared data and logs may fill it; free some space"
    )


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(
            name="shared memory", state="warning", detail="there is no /dev/shm", mend="Ray falls back to /tmp"
        )
    total_bytes = shutil.disk_usage(folder).total
    detail = f"/dev/shm holds {format_bytes(total_bytes)}"
    if total_bytes > LOW_SHARED_MEMORY_BYTES:
        return Check(name="shared memory", state="ok", detail=detail)
    return Check(name="shared memory", state="warning", detail=detail, mend="give the container more: --shm-size=8g")


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY
    detail = f"a process may lock {'any amount' if is_unlimited else format_bytes(soft)} of memory"
    if is_unlimited or soft >= LOW_LOCKED_MEMORY_BYTES or not gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return Check(name="locked memory", state="ok", detail=detail)
    mend = "offloading pins host memory: raise it (ulimit -l unlimited, or --ulimit memlock=-1)"
    return Check(name="locked memory", state="warning", detail=detail, mend=mend)


def _tracking(uri: str | None, home: Path) -> Check:
    try:
        detail = wiring.check_tracking(uri, home)
    except BrimfulError as error:
        return Check(name="tracking", state="blocking", detail=str(error), mend="or run with --no-tracking")
    return Check(name="tracking", state="ok", detail=detail)
