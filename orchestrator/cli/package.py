"""What a submitted sweep takes along: its spec and the local files that it names, and never a secret."""

import fnmatch
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.errors import UsageError
from orchestrator.contract.units import MIB, format_bytes
from orchestrator.spec.load import LoadedSpec

MOST_BYTES = 400 * MIB
"""Below the 512 MiB that Ray's head takes of one folder (ray/_private/runtime_env/packaging.py)."""
SPEC_FILE = "spec.yaml"
_LEFT_OUT_FOLDERS = frozenset({
    ".git", ".hg", ".svn", ".ssh", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".gnupg", ".brimful", "__pycache__",
    "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache", "mlruns", "mlartifacts",
})  # fmt: skip
_LEFT_OUT_FILES = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", "*.pem", "*.key",
    "*.p12", "*.pfx", "*.keytab", "id_rsa*", "id_ed25519*", "id_ecdsa*", "*credentials", "*credentials.*", "*secret",
    "*secret.*", "*secrets", "*secrets.*", "kubeconfig", "*.pyc",
    # Ray would leave out what these name, the spec's own files too
    ".gitignore", ".rayignore",
)  # fmt: skip
_TOKEN_FILE = re.compile(r"(^|[._-])token($|[._-])")
"""Names like `hf_token.txt` and `.token`; a model's `tokenizer.json` and `added_tokens.json` hold no secrets."""
_VENV_MARK = "pyvenv.cfg"


@dataclass(frozen=True)
class Package:
    """A staged folder. `overrides` name its files where the spec named those here; `left_out` is told to the user."""

    folder: Path
    digest: str
    overrides: tuple[str, ...]
    left_out: tuple[str, ...]
    size_bytes: int


def stage(loaded: LoadedSpec, working_dir: Path | None, folder: Path, with_files: bool = True) -> Package:
    """Copy the spec, the files that it names unless not `with_files`, and all of `working_dir` into the empty `folder`.

    Raises UsageError when they are too large for Ray's head, or what the spec names is a secret by its name.
    """
    left_out: list[str] = []
    overrides = list(loaded.overrides)
    copies: list[tuple[Path, Path]] = []
    if working_dir is not None:
        if not working_dir.is_dir():
            raise UsageError(f"--working-dir {working_dir} is no folder")
        copies += _copies(working_dir, Path(), left_out)
    for word, path in _named(loaded):
        target = path
        if with_files:
            if path.is_file() and _may_hold_secret(path.name):
                raise UsageError(f"{word}: {path} may hold a secret by its name, and is not sent; give it another one")
            target = Path("files") / word.replace(".", "-") / path.name
            copies += _copies(path, target, left_out)
        overrides = _replaced(overrides, word, target)
    if (price := loaded.spec.resources.price_per_device_hour) is not None:
        overrides = _replaced(overrides, "resources.price_per_device_hour", price)  # it may be a profile's, of here
    size_bytes = len(loaded.text) + sum(source.stat().st_size for source, _ in copies)
    if size_bytes > MOST_BYTES:
        raise UsageError(
            f"the spec's files hold {format_bytes(size_bytes)}, at most {format_bytes(MOST_BYTES)} can be submitted; "
            "put them where all nodes of the cluster see them and name that absolute path in the spec (where this "
            "machine sees it too, say --no-files)"
        )
    for source, target in copies:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / target)
    (folder / SPEC_FILE).write_text(loaded.text)
    return Package(folder, _digest(folder), tuple(overrides), tuple(left_out), size_bytes)


def _replaced(overrides: list[str], word: str, value: object) -> list[str]:
    return [each for each in overrides if each.partition("=")[0].strip() != word] + [f"{word}={value}"]


def _named(loaded: LoadedSpec) -> Iterator[tuple[str, Path]]:
    """Files and folders of this machine that the spec names; a path that is not here is the cluster's own."""
    spec = loaded.spec
    for word, text in (
        ("model.path", spec.model.path),
        ("data.path", spec.data.path),
        ("data.tokenizer", spec.data.tokenizer),
    ):
        if text is not None and Path(text).is_absolute() and Path(text).exists():
            yield word, Path(text)


def _copies(source: Path, target: Path, left_out: list[str]) -> Iterator[tuple[Path, Path]]:
    """Each file to copy and where to: plain ones alone, without secrets, repositories, environments, and links that
    lead out of `source`."""
    if source.is_file():
        yield source, target
        return
    root = source.resolve()
    for here, folders, files in os.walk(root):
        kept = [name for name in folders if not _is_left_out_folder(Path(here) / name)]
        left_out += [str(Path(here) / name) for name in folders if name not in kept]
        folders[:] = kept
        for name in files:
            file = Path(here) / name
            if _may_go(file, root):
                yield file, target / file.relative_to(root)
            else:
                left_out.append(str(file))


def _is_left_out_folder(folder: Path) -> bool:
    return folder.name in _LEFT_OUT_FOLDERS or (folder / _VENV_MARK).exists() or folder.is_symlink()


def _may_hold_secret(name: str) -> bool:
    lower = name.lower()
    return bool(_TOKEN_FILE.search(lower)) or any(fnmatch.fnmatch(lower, pattern) for pattern in _LEFT_OUT_FILES)


def _may_go(file: Path, root: Path) -> bool:
    if _may_hold_secret(file.name):
        return False
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError):
        return False  # a link that leads nowhere, or in a circle
    if not target.is_relative_to(root) or not stat.S_ISREG(target.stat().st_mode):
        return False
    if not file.is_symlink():
        return True
    folders = [folder for folder in target.parents if folder.is_relative_to(root) and folder != root]
    return not _may_hold_secret(target.name) and not any(map(_is_left_out_folder, folders))


def _digest(folder: Path) -> str:
    """Names and contents of all files: the same files are the same submission."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()[:16]
