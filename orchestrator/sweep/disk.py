"""Whether the disk holds what a sweep writes: asked before it starts, and watched while it runs."""

import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.errors import StorageError, UsageError
from orchestrator.contract.units import KIB, MIB, format_bytes

# Measured in a sweep of 4 trials and 6 confirmations of one rank, MLflow under the home folder: 37 kB of disk blocks
# for a trial's first attempt (8 files and folders), 4.9 MB of reports, each of which lies there twice while it is
# replaced, 0.1 MB of study.db; MLflow took 5 MB for the sweep and 121 kB for each attempt.
ATTEMPT_BYTES, RANK_BYTES, SWEEP_BYTES = 40 * KIB, 16 * KIB, 12 * MIB
TRACKED_ATTEMPT_BYTES, TRACKED_SWEEP_BYTES = 160 * KIB, 8 * MIB
ATTEMPT_FILES, SWEEP_FILES, TRACKED_ATTEMPT_FILES = 8, 40, 6
FORESEEN_TRIALS = 100
"""So many are reckoned with where the budget does not bound their number."""
RESERVE_BYTES, RESERVE_FILES = 2 * MIB, 32
"""Below this the sweep ends, while its records and those of running trials can still be written whole."""


@dataclass(frozen=True)
class Room:
    """Bytes and files; `files` None: not bounded."""

    disk_bytes: int
    files: int | None


def needed(attempts: int, ranks: int, is_tracked: bool) -> Room:
    """What `attempts` of `ranks` ranks each write in all, reports and export included; `is_tracked`: MLflow is here."""
    each_bytes = ATTEMPT_BYTES + (ranks - 1) * RANK_BYTES + (TRACKED_ATTEMPT_BYTES if is_tracked else 0)
    each_files = ATTEMPT_FILES + 2 * (ranks - 1) + (TRACKED_ATTEMPT_FILES if is_tracked else 0)
    sweep_bytes = SWEEP_BYTES + (TRACKED_SWEEP_BYTES if is_tracked else 0)
    return Room(sweep_bytes + attempts * each_bytes, SWEEP_FILES + attempts * each_files)


def free(folder: Path) -> Room:
    """What the file system of `folder`, or of the nearest folder above it that exists, still takes."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    status = os.statvfs(place)
    return Room(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


def require_room(home: Path, need: Room) -> None:
    """Raise UsageError when the disk of `home` does not hold `need`."""
    left = free(home)
    if left.disk_bytes < need.disk_bytes:
        shortage = f"has {format_bytes(left.disk_bytes)} free, the sweep writes about {format_bytes(need.disk_bytes)}"
    elif left.files is not None and need.files is not None and left.files < need.files:
        shortage = f"takes {left.files} more files, the sweep writes about {need.files}"
    else:
        return
    raise UsageError(f"the disk of {home} {shortage}; free some space or choose another folder with --home")


def require_reserve(folder: Path) -> None:
    """Raise StorageError when the disk of `folder` is all but full."""
    left = free(folder)
    if left.disk_bytes < RESERVE_BYTES:
        shortage = f"{format_bytes(left.disk_bytes)} are left"
    elif left.files is not None and left.files < RESERVE_FILES:
        shortage = f"it takes {left.files} more files"
    else:
        return
    raise StorageError(
        f"the disk of {folder} is full ({shortage}): the sweep has ended with whole records; free some space and say "
        "the command again to go on"
    )
