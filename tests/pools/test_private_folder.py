"""What a private cluster leaves in the folder for temporary files."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from orchestrator.backends.ray_connect import PrivateFolder, remove_left_behind

_KILLED_DRIVER = """
import os, signal
from orchestrator.backends.ray_connect import PrivateFolder
folder = PrivateFolder()
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_old(folder: Path) -> None:
    os.utime(folder / "driver.lock", (0, 0))


def test_only_the_folders_of_killed_drivers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subprocess.run([sys.executable, "-c", _KILLED_DRIVER], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    living = PrivateFolder()
    foreign = tmp_path / "brimful-notes"
    foreign.mkdir()
    remove_left_behind()
    assert left.exists(), "it is younger than the time that a driver has to lock its folder"
    make_old(left)
    make_old(living.path)
    remove_left_behind()
    assert sorted(tmp_path.iterdir()) == sorted([living.path, foreign])
    living.remove()
    assert list(tmp_path.iterdir()) == [foreign]
