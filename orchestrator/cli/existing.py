"""What `run` does when a sweep of the spec's name exists already."""

import os

from orchestrator.contract.config import MeasureSettings, TrainSettings
from orchestrator.contract.errors import SweepExistsError
from orchestrator.spec.difference import describe_difference, spec_digest
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import HOLDER_FILE, LOCK_FILE, SWEEP_FILE, Ledger

_SHOWN_DIFFERENCES = 20


def require_admissible(ledger: Ledger, spec: SweepSpec, extend: bool) -> None:
    """Raise SweepExistsError with the differences when `spec` may not go on with the sweep of its name."""
    if not ledger.exists():
        return
    old = SweepSpec.model_validate(ledger.read_sweep().spec)
    if spec_digest(old) == spec_digest(spec):
        return
    fixed = _fixed_differences(old, spec)
    if extend and not fixed:
        return
    differences = describe_difference(old, spec)
    shown = [f"  {line}" for line in differences[:_SHOWN_DIFFERENCES]]
    if len(differences) > len(shown):
        shown.append(f"  and {len(differences) - len(shown)} more")
    why = (
        f"--extend cannot change {', '.join(fixed)}, since new trials would not compare with the old ones; "
        "say --new to archive the old sweep and start afresh, or give the spec another name"
        if extend
        else "say --extend to keep its trials and go on with the new spec, --new to archive it and start afresh, "
        "or give the spec another name"
    )
    head = f"a sweep named {spec.name} exists in {ledger.home} with another spec:"
    raise SweepExistsError("\n".join([head, *shown, why]))


def archive(ledger: Ledger) -> str:
    """Move the sweep to the first free name `NAME.1`, `NAME.2`, ... and return it. The caller holds the lock."""
    record = ledger.read_sweep()
    number = 1
    while ledger.folder.with_name(f"{ledger.name}.{number}").exists():
        number += 1
    target = Ledger(ledger.home, f"{ledger.name}.{number}")
    target.folder.mkdir(mode=0o700)
    kept = {LOCK_FILE, HOLDER_FILE, SWEEP_FILE}
    for entry in ledger.folder.iterdir():
        if entry.name not in kept:
            os.rename(entry, target.folder / entry.name)
    # last, so that a crash on the way leaves a sweep of the old name
    target.write_sweep(record.model_copy(update={"name": target.name}))
    (ledger.folder / SWEEP_FILE).unlink()
    return target.name


def _fixed_differences(old: SweepSpec, new: SweepSpec) -> list[str]:
    """Places that decide what a measurement means and that both specs must share."""
    sections = [name for name in ("model", "data", "limits") if getattr(old, name) != getattr(new, name)]
    sections += [
        f"measure.{name}"
        for name in MeasureSettings.model_fields
        if getattr(old.measure, name) != getattr(new.measure, name)
    ]
    settings = [
        f"train.{name}" for name in TrainSettings.model_fields if getattr(old.train, name) != getattr(new.train, name)
    ]
    resources = [
        f"resources.{name}"
        for name in ("devices_per_trial", "nodes", "device")
        if getattr(old.resources, name) != getattr(new.resources, name)
    ]
    return sections + settings + resources
