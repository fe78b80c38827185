"""`run` and `resume`: from a spec to a finished sweep."""

import time
import uuid
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from orchestrator import wiring
from orchestrator.cli.existing import archive, require_admissible
from orchestrator.cli.live import run_view
from orchestrator.cli.output import Output
from orchestrator.cli.results import ResultFiles, conclude, write_results
from orchestrator.cli.signals import catching, leaving_on_sigterm
from orchestrator.contract.errors import SpecError, SweepExistsError, UsageError
from orchestrator.contract.facts import Facts
from orchestrator.contract.handoff import read_model, write_atomic
from orchestrator.contract.record import SweepRecord, SweepState
from orchestrator.placement.forecast import Forecaster
from orchestrator.placement.kinds import choose_kind, facts_on
from orchestrator.placement.layouts import refused_layouts
from orchestrator.placement.preflight import preflight
from orchestrator.placement.promising import with_promising
from orchestrator.search.cost import planned_tokens
from orchestrator.space.candidates import Space, build_space
from orchestrator.spec.difference import ends_alike, spec_digest
from orchestrator.spec.load import load_spec
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep import disk
from orchestrator.sweep.audit import audit
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Interrupt, Services, run_sweep
from orchestrator.sweep.ports import NODE_TIMEOUT_S, TrialPool

CACHE_FOLDER = "cache"


@dataclass(frozen=True)
class RunRequest:
    """What the command line says beside the spec. `pool` None: as before, else ray."""

    home: Path
    pool: str | None
    address: str | None
    allow_remote_code: bool
    as_json: bool
    quiet: bool
    predictions: bool = True
    node_timeout_s: float = NODE_TIMEOUT_S


@dataclass(frozen=True)
class Order:
    """A sweep to drive: its spec as read, and the command line's wishes."""

    spec: SweepSpec
    text: str
    path: str
    overrides: tuple[str, ...]
    request: RunRequest
    output: Output
    is_new: bool = False
    """An earlier sweep of this name is archived first."""


def run_spec(path: Path, overrides: tuple[str, ...], request: RunRequest, new: bool, extend: bool) -> int:
    """Run the spec at `path`, or go on with the sweep that it began. Returns the exit code."""
    if new and extend:
        raise UsageError("--new starts afresh and --extend goes on: choose one of them")
    loaded = load_spec(path, overrides, request.allow_remote_code)
    output = Output(request.as_json, request.quiet)
    for note in loaded.notes:
        output.say(f"Note: {note}")
    ledger = Ledger(request.home, loaded.spec.name)
    if not new:
        require_admissible(ledger, loaded.spec, extend)
    return _drive(Order(loaded.spec, loaded.text, str(path), overrides, request, output, is_new=new), ledger)


def resume_sweep(name: str, request: RunRequest) -> int:
    """Go on with the sweep `name` from its stored spec. Returns the exit code."""
    ledger = Ledger(request.home, name)
    record = ledger.read_sweep()
    spec = SweepSpec.model_validate(record.spec)
    if spec.model.trust_remote_code and not request.allow_remote_code:
        raise UsageError(f"the model of {name} runs code of its own; say --allow-remote-code to let it")
    output = Output(request.as_json, request.quiet)
    text = ledger.spec_file.read_text()
    return _drive(Order(spec, text, record.spec_path, record.overrides, request, output), ledger)


def _drive(order: Order, ledger: Ledger) -> int:
    spec, request, output = order.spec, order.request, order.output
    with leaving_on_sigterm(), ledger.lock():
        audit(request.home, "run" if order.is_new or not ledger.exists() else "resume", spec.name)
        before = ledger.read_sweep() if ledger.exists() and not order.is_new else None
        if before is not None and _is_done(before, spec):
            output.say(f"Sweep {spec.name} is finished already; nothing runs. `brimful run --new` starts afresh.")
            _restore_rows(order, ledger)
            return conclude(ledger, write_results(ledger), output)
        wiring.require_tracking(spec.tracking, output.say)
        pool_name = request.pool or (before.pool if before else wiring.DEFAULT_POOL)
        pool = wiring.build_pool(pool_name, request.address, request.node_timeout_s)
        try:
            chosen = choose_kind(pool.cluster(), spec.resources.device, before.device_kind if before else None)
            pool.use(chosen.kind)
            if chosen.note:
                output.say(chosen.note)
            # before the model and the data are looked at, which may take minutes
            refused = refused_layouts(spec.resources.layouts, pool.check)
            output.say(f"Sweep {spec.name}: looking at the model and the data.")
            threads = wiring.threads_per_rank()
            facts = preflight(spec, order.path, request.home / CACHE_FOLDER, threads)
            facts = facts_on(facts, chosen.device)
            if facts.device == "cpu" and spec.resources.device == "auto" and pool.cluster().device_kind == "GPU":
                output.say(
                    "Note: what the cluster's GPUs are is not known, so trials run on CPUs; name resources.device."
                )
            space = build_space(spec, facts, threads)
            if space.baseline is not None:
                pool.check(*space.baseline.config.layout)
            space = space.refusing(refused)
            _require_candidates(space, order.path)
            _require_room(order, ledger, space)
            if before is not None:
                _require_same_data(ledger, facts)
            _announce(space, facts, output)
            devices_on_node = max((node.devices for node in pool.cluster().nodes if node.is_alive), default=None)
            forecaster = _forecaster(order, facts, space, devices_on_node)
            space = _with_promising(space, forecaster, output)
            space = wiring.leave_out_hopeless(spec, facts, space, forecaster)
            if space.left_out:
                output.say(f"{len(space.left_out)} candidates surely do not fit and are left out.")
            if order.is_new and ledger.exists():
                name = archive(ledger)
                output.say(f"The earlier sweep is kept as {name}; `brimful delete {name}` removes it.")
            _write(order, ledger, facts, _record(order, before, (space, facts), pool_name, chosen.kind))
            files = _run(order, ledger, (facts, space, pool, forecaster))
        finally:
            pool.close()
        return conclude(ledger, files, output)


_Parts = tuple[Facts, Space, TrialPool, Forecaster | None]


def _run(order: Order, ledger: Ledger, parts: _Parts) -> ResultFiles:
    facts, space, pool, forecaster = parts
    gate = wiring.build_gate(order.spec, facts, forecaster)
    records = ledger.read_trials()
    if forecaster is not None:
        for record in records:
            forecaster.learn(record)
    interrupt = Interrupt()
    with (
        run_view(ledger, order.output) as view,
        catching(interrupt, view.remark),
        ExitStack() as stack,
    ):
        strategy = wiring.build_strategy(order.spec, space, ledger.folder, records, forecaster, view.remark)
        stack.enter_context(closing(strategy))
        tracking = wiring.build_tracking(order.spec, ledger, view.remark)
        if tracking is not None:
            stack.enter_context(closing(tracking))
        services = Services(
            pool=pool,
            strategy=strategy,
            logs=(view,) if tracking is None else (view, tracking),
            gate=gate,
            efficiency=wiring.efficiency_of(facts, view.remark),
            interrupt=interrupt,
        )
        try:
            run_sweep(order.spec, ledger, services)
            files = write_results(ledger)
        finally:
            if tracking is not None and interrupt.cause is not None:
                tracking.hurry()
        if tracking is not None:
            for file, folder in files.attachments:
                tracking.attach(file, folder)
        return files


def _forecaster(order: Order, facts: Facts, space: Space, devices_on_node: int | None) -> Forecaster | None:
    """What predicts the trials; None where nothing would use it or the user does without."""
    if not order.request.predictions or not wiring.uses_predictions(order.spec, facts):
        return None
    cache = order.request.home / CACHE_FOLDER
    return wiring.build_forecaster(order.spec, facts, space, cache, order.output.say, devices_on_node)


def _with_promising(space: Space, forecaster: Forecaster | None, output: Output) -> Space:
    if forecaster is None or not space.is_sampled:
        return space
    more = with_promising(space, forecaster)
    added = len(more.candidates) - len(space.candidates)
    output.say(f"{added} more candidates: those around the places that are predicted fastest.")
    return more


def _is_done(before: SweepRecord, spec: SweepSpec) -> bool:
    """Whether nothing is left to do: it ended by itself, for this spec, this budget and these stop rules."""
    old = SweepSpec.model_validate(before.spec)
    is_same = spec_digest(old) == spec_digest(spec) and ends_alike(old, spec)
    return before.state is SweepState.FINISHED and is_same


def _restore_rows(order: Order, ledger: Ledger) -> None:
    """Prepare the rows again when the home has moved or its cache is gone: the export needs them."""
    if Path(read_model(ledger.facts_file, Facts).data.directory).is_dir():
        return
    facts = preflight(order.spec, order.path, order.request.home / CACHE_FOLDER, wiring.threads_per_rank())
    _require_same_data(ledger, facts)
    known = read_model(ledger.facts_file, Facts)
    write_atomic(ledger.facts_file, known.model_copy(update={"data": facts.data}).model_dump_json(indent=1))


def _require_candidates(space: Space, path: str) -> None:
    if space.candidates:
        return
    reasons = "; ".join(f"{reason} ({count} points)" for reason, count in space.illegal.most_common(3))
    raise SpecError(f"{path}: search: none of the {space.raw_points} points can be run: {reasons}")


def _require_room(order: Order, ledger: Ledger, space: Space) -> None:
    spec, is_new = order.spec, order.is_new or not ledger.exists()
    bound = spec.budget.trials or disk.FORESEEN_TRIALS
    trials = max(0, min(bound, len(space.candidates)) - (0 if is_new else len(ledger.read_trials())))
    attempts = trials + spec.measure.confirm.top * spec.measure.confirm.repeats
    is_tracked = spec.tracking.enabled and spec.tracking.uri is None
    disk.require_room(order.request.home, disk.needed(attempts, max(spec.resources.world_sizes), is_tracked))


def _require_same_data(ledger: Ledger, facts: Facts) -> None:
    old = read_model(ledger.facts_file, Facts)
    if old.data.digest != facts.data.digest:
        raise SweepExistsError(
            f"the data of sweep {ledger.name} has changed since its first trial, so new trials would not compare with "
            "the old ones; say --new to archive them and start afresh, or give the spec another name"
        )


def _announce(space: Space, facts: Facts, output: Output) -> None:
    for reason, count in space.illegal.most_common() if space.has_refused else ():
        output.say(f"Left out ({count}): {reason}.")
    for note in space.notes:
        output.say(f"Note: {note}.")
    left_out = f"{space.duplicates} duplicates and {sum(space.illegal.values())} illegal points left out"
    output.say(f"{len(space.candidates)} candidates ({left_out}) on {facts.device_name}.")
    if space.is_default:
        output.say("The spec has no `search`: these are the default choices, `brimful plan` shows them.")


def _record(
    order: Order, before: SweepRecord | None, found: tuple[Space, Facts], pool: str, kind: str | None
) -> SweepRecord:
    space, facts = found
    now_s = time.time()
    fields = {
        "spec": order.spec.model_dump(mode="json"),
        "spec_digest": spec_digest(order.spec),
        "spec_path": order.path,
        "overrides": order.overrides,
        "pool": pool,
        "device_kind": kind,
        "candidates": len(space.candidates) + len(space.left_out),
        "left_out": dict(Counter(space.left_out.values())),
        "planned_tokens": planned_tokens(order.spec.train, facts.data),
        "updated_s": now_s if before is None else before.updated_s,
    }
    if before is not None:
        return before.model_copy(update=fields)
    return SweepRecord.model_validate(
        {
            "name": order.spec.name,
            "sweep_id": uuid.uuid4().hex[:12],
            "state": SweepState.RUNNING,
            "created_s": now_s,
            **fields,
        }
    )


def _write(order: Order, ledger: Ledger, facts: Facts, record: SweepRecord) -> None:
    ledger.create_folder()
    write_atomic(ledger.spec_file, order.text)
    write_atomic(ledger.facts_file, facts.model_dump_json(indent=1))
    ledger.write_sweep(record)
