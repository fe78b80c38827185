"""What a submitted sweep takes along: never a secret, a repository or what lies outside of the folder."""

import io
import os
import socket
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.brimful_command import SPEC

from orchestrator.cli.package import MOST_BYTES, Package, stage
from orchestrator.cli.remote import Remote, _unpacked
from orchestrator.cli.submit import Submission, plain_environment, submit_spec
from orchestrator.contract.errors import BrimfulError, UsageError
from orchestrator.spec.load import load_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project of a user, with a spec and all that must not travel."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "rows.txt").write_text("a line\n" * 60)
    text = SPEC.format(name="packed", limit="512MiB", steps=2, dropout=0.0, ranks="[2]", top=0)
    (folder / "sweep.yaml").write_text(text)
    (folder / ".gitignore").write_text("*.txt\n")
    return folder


def staged(folder: Path, target: Path, whole: bool = True) -> Package:
    target.mkdir()
    return stage(load_spec(folder / "sweep.yaml"), folder if whole else None, target)


def names(target: Path) -> set[str]:
    return {str(file.relative_to(target)) for file in target.rglob("*") if not file.is_dir()}


def test_without_a_folder_only_what_the_spec_names_goes_along(folder: Path, tmp_path: Path) -> None:
    package = staged(folder, tmp_path / "stage", whole=False)
    assert names(package.folder) == {"spec.yaml", "files/data-path/rows.txt"}
    assert package.overrides == ("data.path=files/data-path/rows.txt",)


@pytest.mark.fault("F10", "I21")
def test_secrets_repositories_and_links_stay_behind(
    folder: Path, tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_text("CANARY")
    secrets = (".env", ".ENV", ".env.local", ".netrc", "server.pem", "id_rsa", "auth_token", ".pgpass", "hf_token.txt")
    for name in secrets:
        (folder / name).write_text("CANARY")
    for name in (".git", ".ssh", "__pycache__", "myenv", "src"):
        (folder / name).mkdir()
        (folder / name / "config").write_text("CANARY" if name != "src" else "code")
    (folder / "myenv" / "pyvenv.cfg").write_text("home = /usr")
    (folder / "loop").symlink_to(folder)
    (folder / "round").symlink_to("round")
    (folder / "away").symlink_to(outside / "passwd")
    (folder / "away-folder").symlink_to(outside)
    (folder / "inside").symlink_to("rows.txt")
    (folder / "harmless").symlink_to(".env")
    (folder / "setup").symlink_to(".git/config")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "src" / "tool").write_text("#!/bin/sh\n")
    (folder / "src" / "tool").chmod(0o4755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "sock"))
        started_s = time.monotonic()
        package = staged(folder, tmp_path / "stage")
        figure("staged in", f"{time.monotonic() - started_s:.1f} s")
    assert names(package.folder) == {
        "spec.yaml",
        "sweep.yaml",
        "rows.txt",
        "inside",
        "tokenizer.json",
        "src/config",
        "src/tool",
        "files/data-path/rows.txt",
    }
    assert all(not file.is_symlink() and not file.stat().st_mode & 0o7000 for file in package.folder.rglob("*"))
    assert b"CANARY" not in b"".join(file.read_bytes() for file in package.folder.rglob("*") if file.is_file())
    assert {Path(name).name for name in package.left_out} >= {".env", ".git", "myenv", "away", "loop", "sock"}


def test_the_clusters_own_paths_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    spec = folder / "sweep.yaml"
    (tmp_path / "stage").mkdir()
    package = stage(load_spec(spec, for_elsewhere=True), None, tmp_path / "stage", with_files=False)
    assert names(package.folder) == {"spec.yaml"}
    assert package.overrides == (f"data.path={folder / 'rows.txt'}",)
    (tmp_path / "other").mkdir()
    loaded = load_spec(spec, ("data.path=/of/the/cluster.txt",), for_elsewhere=True)
    assert stage(loaded, None, tmp_path / "other").overrides == ("data.path=/of/the/cluster.txt",)


def test_a_secret_that_the_spec_names_is_not_sent(folder: Path, tmp_path: Path) -> None:
    (folder / "id_rsa").write_text("CANARY")
    loaded = load_spec(folder / "sweep.yaml", (f"data.path={folder / 'id_rsa'}",))
    with pytest.raises(UsageError, match=r"data.path: .*id_rsa may hold a secret"):
        stage(loaded, None, tmp_path)


def archive_of(member: str, link: str | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        entry = tarfile.TarInfo(member)
        entry.mode = 0o4755
        if link is not None:
            entry.type, entry.linkname = tarfile.SYMTYPE, link
        archive.addfile(entry)
    return stream.getvalue()


@pytest.mark.fault("I21")
@pytest.mark.parametrize(("member", "link"), [("../outside", None), ("link", "/etc/passwd"), ("link", "../outside")])
def test_what_a_cluster_sends_cannot_leave_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, link: str | None
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BrimfulError, match=r"lead out of their folder"):
        list(_unpacked(archive_of(member, link), None))
    assert names(tmp_path) == set()


@pytest.mark.fault("I21")
def test_what_a_cluster_sends_gets_no_rights(tmp_path: Path) -> None:
    list(_unpacked(archive_of("report.html"), tmp_path / "report.html"))
    assert not (tmp_path / "report.html").stat().st_mode & 0o7000


@pytest.mark.fault("I4")
def test_a_spec_with_a_password_is_not_sent(folder: Path) -> None:
    remote = Remote("http://127.0.0.1:1")
    words = ("tracking.uri=http://me:CANARY@mlflow.example:5000",)
    with pytest.raises(UsageError, match=r"holds a password") as caught:
        submit_spec(folder / "sweep.yaml", words, remote, Submission((), (), False, False, False))
    assert "CANARY" not in str(caught.value)


@pytest.mark.fault("F10")
def test_what_is_too_large_is_refused_with_the_mend(folder: Path, tmp_path: Path) -> None:
    with open(folder / "huge.bin", "wb") as file:
        os.truncate(file.fileno(), MOST_BYTES + 1)
    with pytest.raises(UsageError, match=r"can be submitted; put them where all nodes of the cluster see them"):
        staged(folder, tmp_path / "stage")
    assert not (tmp_path / "stage" / "huge.bin").exists()


def test_the_same_files_are_the_same_submission(folder: Path, tmp_path: Path) -> None:
    first = staged(folder, tmp_path / "one").digest
    assert staged(folder, tmp_path / "two").digest == first
    (folder / "rows.txt").write_text("another line\n" * 60)
    assert staged(folder, tmp_path / "three").digest != first


@pytest.mark.fault("I4")
@pytest.mark.parametrize(
    "word", ["HF_TOKEN=x", "WANDB_API_KEY=x", "DB=postgresql://u:p@h/db", "MLFLOW_TRACKING_PASSWORD=x", "NAME"]
)
def test_secrets_are_no_variables_of_a_job(word: str) -> None:
    with pytest.raises(UsageError, match=r"--env"):
        plain_environment([word])


def test_plain_variables_are() -> None:
    assert plain_environment(["HF_HOME=/shared/hf", "A="]) == {"HF_HOME": "/shared/hf", "A": ""}
