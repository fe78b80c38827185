"""The export folder: all targets of one trial, and its rows."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue

from orchestrator.contract.errors import StateError, UsageError
from orchestrator.contract.handoff import write_atomic
from orchestrator.report.export import deepspeed_json, hf_json, launch, model_json, peft_json
from orchestrator.report.export.measured import MeasuredTrial

DATA_FOLDER = "data"
MEASURED_FILE = "measured.json"
_ROW_FILES = ("tokens.bin", "offsets.bin")
_DESCRIPTION_FILE = "data.json"


def export_files(trial: MeasuredTrial) -> dict[str, str]:
    """Name and content of every file of the export, the rows left out."""
    documents: dict[str, dict[str, JsonValue] | None] = {
        deepspeed_json.FILE: deepspeed_json.deepspeed_config(trial),
        hf_json.FILE: hf_json.training_arguments(trial),
        model_json.FILE: model_json.model_settings(trial),
        model_json.OPTIMIZER_FILE: model_json.optimizer_settings(trial),
        peft_json.FILE: peft_json.adapter_config(trial),
        MEASURED_FILE: _measured(trial),
    }
    texts = {name: json.dumps(content, indent=1) + "\n" for name, content in documents.items() if content is not None}
    return texts | {launch.LAUNCH_FILE: launch.launch_script(trial), launch.SCRIPT_FILE: launch.training_script(trial)}


def _measured(trial: MeasuredTrial) -> dict[str, JsonValue]:
    return {
        "sweep": trial.sweep.name,
        "trial": trial.record.trial,
        "candidate": trial.record.candidate,
        "label": trial.record.label,
        "versions": dict(trial.versions),
        "reported": asdict(trial.figures),
        "measurement": trial.measurement.model_dump(mode="json"),
    }


def write_export(trial: MeasuredTrial, folder: Path, force: bool = False) -> list[Path]:
    """Write the export to `folder` and return its files.

    Raises UsageError when `folder` has content and not `force`, and StateError when the prepared rows are gone.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise UsageError(f"{folder} exists already; choose another with --output, or replace its files with --force")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder with --output")
    rows = Path(trial.rows)
    missing = [name for name in (*_ROW_FILES, _DESCRIPTION_FILE) if not (rows / name).is_file()]
    if missing:
        raise StateError(f"the prepared rows are gone: {rows / missing[0]} is missing; `brimful resume` prepares them")
    (folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / peft_json.FILE).unlink(missing_ok=True)
    written = []
    for name, content in export_files(trial).items():
        write_atomic(folder / name, content)
        written.append(folder / name)
    (folder / launch.LAUNCH_FILE).chmod(0o755)
    return [*written, *_place_rows(trial, rows, folder / DATA_FOLDER)]


def _place_rows(trial: MeasuredTrial, rows: Path, target: Path) -> list[Path]:
    """The row files, linked where the file system allows it, and their description with the settings of the run."""
    placed = []
    for name in _ROW_FILES:
        (target / name).unlink(missing_ok=True)
        try:
            os.link(rows / name, target / name)
        except OSError:
            shutil.copyfile(rows / name, target / name)
        placed.append(target / name)
    description = json.loads((rows / _DESCRIPTION_FILE).read_text())
    description.pop("directory", None)
    settings = {"sequence_length": trial.config.data.sequence_length, "packing": trial.config.data.packing}
    write_atomic(target / _DESCRIPTION_FILE, json.dumps(description | settings, indent=1) + "\n")
    return [*placed, target / _DESCRIPTION_FILE]
