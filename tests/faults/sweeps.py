"""Places for sweeps of the real command line whose ranks train nothing, and what must hold of a sweep after a fault."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from cli.brimful_command import Workplace

from faults.crash_session import Session
from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.sweep.ledger import Ledger

LOCAL = ("--pool", "local", "--no-tracking")
TWELVE = "[2, 4, 8, 16, 32]"
"""LoRA ranks that make twelve candidates of the spec."""


def new_place(folder: Path, prepared: Workplace, behaviour: str, home: Path | None = None) -> Workplace:
    """A workplace in `folder` of its own; the preflight that ran at `prepared` holds there too."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(prepared.folder / "rows.txt", folder / "rows.txt")
    home = home or folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(prepared.folder / "home" / "cache", home / "cache")
    if home != folder / "home":
        (folder / "home").symlink_to(home)
    return Workplace(folder, behaviour=behaviour)


def records(home: Path | str, name: str = "sweep") -> list[TrialRecord]:
    """All trials of the sweep."""
    return Ledger(Path(home), name).read_trials()


def ended_files(home: Path | str, name: str = "sweep") -> dict[Path, bytes]:
    """The file of every trial that has come to an end of its own, with its bytes."""
    trials = Ledger(Path(home), name).folder / "trials"
    ends = [each for each in records(home, name) if each.outcome is not None and each.outcome.kind != "cancelled"]
    return {(file := trials / f"{each.trial:04d}" / "trial.json"): file.read_bytes() for each in ends}


def assert_kept(seen: Mapping[Path, bytes]) -> None:
    """What had ended has not changed since."""
    for file, content in seen.items():
        assert file.read_bytes() == content, f"{file} changed after its trial had ended"


def assert_whole(home: Path | str, trials: int, name: str = "sweep") -> list[TrialRecord]:
    """The sweep is finished: every trial number once, each with exactly one accepted result, no candidate twice."""
    found = records(home, name)
    assert [each.trial for each in found] == list(range(trials))
    assert len({each.candidate for each in found}) == trials
    for each in found:
        accepted = [a for a in each.searches if a.outcome is not None and a.outcome.kind != "cancelled"]
        assert len(accepted) == 1, f"trial {each.trial} has {len(accepted)} results"
    assert Ledger(Path(home), name).read_sweep().state is SweepState.FINISHED
    return found


def session_at(folder: Path, **fields: object) -> Session:
    """A session whose home is `folder`."""
    folder.mkdir(exist_ok=True)
    return Session(str(folder), **fields)  # type: ignore[arg-type]
