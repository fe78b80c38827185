"""`init`: a commented spec to begin with."""

from importlib.resources import files
from pathlib import Path

from orchestrator.cli.output import Output
from orchestrator.contract.errors import UsageError
from orchestrator.contract.handoff import write_atomic


def write_example(file: Path, force: bool, as_json: bool = False) -> None:
    """Write the example to `file`. Raises UsageError when it exists and not `force`."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name a file, e.g. brimful init {file}/sweep.yaml")
    if file.exists() and not force:
        raise UsageError(f"{file} exists already; choose another name, or replace it with --force")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first")
    write_atomic(file, (files("orchestrator.cli") / "example.yaml").read_text())
    output = Output(as_json)
    output.document({"file": str(file)})
    output.show(f"Wrote {file}. Next: set model and data in it, then brimful plan {file}")
