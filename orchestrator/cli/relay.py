"""The end in the cluster of what is asked from outside: `python -m orchestrator.cli.relay drive|ask HOME ...`.

`drive HOME DIGEST VERB ...` moves the uploaded files from the job's folder, which Ray removes one day, to the home, and
becomes `brimful VERB ...` there, joined to the cluster that the job runs in. `ask HOME VERB ...` runs a verb that
answers, and prints one line with all that it printed and wrote.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import NoReturn

ANSWER_MARK = "BRIMFUL-ANSWER "
SUBMITTED_FOLDER = "submitted"
NOTHING_UPLOADED = "-"
_RAY_ADDRESS = "RAY_ADDRESS"


def main(words: list[str]) -> None:
    """Do what `words` say."""
    mode, home, *rest = words
    folder = Path(home).expanduser().resolve()
    if mode == "drive":
        _drive(folder, rest)
    _ask(folder, rest)


def _drive(home: Path, words: list[str]) -> NoReturn:
    digest, verb, *rest = words
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if digest != NOTHING_UPLOADED:
        os.chdir(_kept(home, digest))
    command = [sys.executable, "-m", "orchestrator.cli", verb, *rest]
    command += ["--home", str(home), "--address", os.environ[_RAY_ADDRESS]]
    os.execv(sys.executable, command)


def _kept(home: Path, digest: str) -> Path:
    """The uploaded files under the home: whole, or not there."""
    kept = home / SUBMITTED_FOLDER / digest
    if not kept.is_dir():
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        aside = kept.with_name(f".{digest}-{uuid.uuid4().hex[:8]}")
        shutil.copytree(Path.cwd(), aside, symlinks=True)
        try:
            aside.rename(kept)
        except OSError:
            shutil.rmtree(aside)  # another driver was faster
    return kept


def _ask(home: Path, words: list[str]) -> None:
    verb, *rest = words
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", verb, *rest, "--home", str(home)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        answer = {
            "exit_code": run.returncode,
            "stdout": run.stdout.decode(errors="replace"),
            "stderr": run.stderr.decode(errors="replace"),
            "files": base64.b64encode(_packed(Path(folder))).decode(),
        }
    print(f"\n{ANSWER_MARK}{json.dumps(answer)}", flush=True)


def _packed(folder: Path) -> bytes:
    """The files of `folder` as a tar archive; empty when there are none."""
    if not any(folder.iterdir()):
        return b""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, arcname=entry.name)
    return stream.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
