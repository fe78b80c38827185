"""What `run` does when a sweep of the spec's name exists already."""

import os

from orchestrator.cli.output import Output
from orchestrator.contract.config import TrainSettings
from orchestrator.contract.errors import SweepExistsError
from orchestrator.spec.difference import describe_difference, spec_digest
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

_SHOWN_DIFFERENCES = 20


def admit(ledger: Ledger, spec: SweepSpec, new: bool, extend: bool, output: Output) -> Ledger:
    """The ledger to run `spec` in: empty, of the same spec, of a spec that --extend allows, or emptied by --new.

    Raises SweepExistsError with the differences when the spec has changed and neither flag says what to do.
    """
    if not ledger.exists():
        return ledger
    if new:
        archived = _archive(ledger)
        output.say(f"The earlier sweep {spec.name} is kept as {archived}; `brimful delete {archived}` removes it.")
        return ledger
    old = SweepSpec.model_validate(ledger.read_sweep().spec)
    if spec_digest(old) == spec_digest(spec):
        return ledger
    fixed = _fixed_differences(old, spec)
    if extend and not fixed:
        return ledger
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


def _fixed_differences(old: SweepSpec, new: SweepSpec) -> list[str]:
    """Places that decide what a measurement means and that both specs must share."""
    sections = [name for name in ("model", "data", "limits", "measure") if getattr(old, name) != getattr(new, name)]
    settings = [
        f"train.{name}" for name in TrainSettings.model_fields if getattr(old.train, name) != getattr(new.train, name)
    ]
    resources = [
        f"resources.{name}"
        for name in ("devices_per_trial", "nodes", "device")
        if getattr(old.resources, name) != getattr(new.resources, name)
    ]
    return sections + settings + resources


def _archive(ledger: Ledger) -> str:
    """Give the sweep's folder the first free name `NAME.1`, `NAME.2`, ... and return it."""
    with ledger.lock():
        record = ledger.read_sweep()
        number = 1
        while ledger.folder.with_name(f"{ledger.name}.{number}").exists():
            number += 1
        name = f"{ledger.name}.{number}"
        os.rename(ledger.folder, ledger.folder.with_name(name))
        Ledger(ledger.home, name).write_sweep(record.model_copy(update={"name": name}))
    return name
