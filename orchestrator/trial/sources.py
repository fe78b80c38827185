"""Raw data from a file, a folder or the hub, through `datasets`."""

import tempfile
from pathlib import Path

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from orchestrator.contract.facts import DataRequest
from orchestrator.trial.formats import Row
from orchestrator.trial.unusable import Unusable

BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
"""A text file is one row a paragraph (blank lines part them); without any blank line, one row a line."""

_NO_ROWS = "corresponds to no data"
"""How `datasets` words a file without any row."""


def load_rows(request: DataRequest) -> tuple[list[Row], str]:
    """The rows that `request` names, and what to call their source in messages. Raises Unusable."""
    datasets.disable_progress_bars()
    if request.path is not None:
        path = Path(request.path)
        return _limited(_load_local(path), request), str(path)
    assert request.id is not None, "a data request names a path or an id"
    return _limited(_load_hub(request.id, request.split), request), f"{request.id} ({request.split})"


def _limited(rows: datasets.Dataset, request: DataRequest) -> list[Row]:
    if request.max_rows is not None:
        rows = rows.select(range(min(request.max_rows, len(rows))))
    return list(rows)


def _load_local(path: Path) -> datasets.Dataset:
    files = _files(path)
    builder = BUILDERS[files[0].suffix.lower()]
    if builder != "text":
        return _build(builder, files, path, {})
    paragraphs = _build(builder, files, path, {"sample_by": "paragraph"})
    if len(paragraphs) > len(files):
        return paragraphs
    return _build(builder, files, path, {"sample_by": "line"})


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise Unusable("data.path", f"{path} does not exist")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    files = [each for each in files if each.suffix.lower() in BUILDERS or not path.is_dir()]
    kinds = {each.suffix.lower() for each in files}
    if not files or not kinds <= BUILDERS.keys():
        found = ", ".join(sorted(kinds)) or "nothing"
        raise Unusable("data.path", f"{path}: found {found}; expected files of {', '.join(BUILDERS)}")
    if len({BUILDERS[kind] for kind in kinds}) > 1:
        raise Unusable("data.path", f"{path} mixes {', '.join(sorted(kinds))}; put one kind of file in a folder")
    empty = next((each for each in files if each.stat().st_size == 0), None)
    if empty is not None:
        raise Unusable("data.path", f"{empty} is empty")
    return files


def _build(builder: str, files: list[Path], path: Path, options: dict[str, str]) -> datasets.Dataset:
    # everything is read into memory at once, so nothing of a local file has to stay in the user's cache
    with tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset(
                builder,
                data_files=[str(each) for each in files],
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **options,
            )
        except (DatasetGenerationError, ValueError, UnicodeDecodeError) as error:
            if _NO_ROWS in str(error):
                raise Unusable("data.path", f"{path} holds no rows") from error
            raise Unusable("data.path", f"{path} cannot be read as {builder}: {_root_cause(error)}") from error


def _load_hub(name: str, split: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset(name, split=split)
    except (DatasetNotFoundError, ConnectionError, OSError) as error:
        raise Unusable(
            "data.id",
            f"the data set {name} cannot be reached: {_root_cause(error)};"
            " where no network is, give data.path or fill the cache that HF_HOME names",
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        raise Unusable("data.id", f"the data set {name} cannot be used: {_root_cause(error)}") from error


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
