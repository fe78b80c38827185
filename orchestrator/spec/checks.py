"""What a spec must be beyond the types of its fields: consistent, and naming files that exist."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import JsonValue

from orchestrator.spec.places import Fault, Places, did_you_mean
from orchestrator.spec.sweep import ANY_DEVICES, SearchSection, SweepSpec

_PATHS = (("model", "path"), ("data", "path"), ("data", "tokenizer"))


def resolve_paths(
    value: dict[str, JsonValue], places: Places, spec_path: Path, overridden: Iterable[str], are_elsewhere: bool = False
) -> list[Fault]:
    """Make the paths in `value` absolute; a fault for each that does not exist.

    A path of the file is looked for in the file's folder, then in the working directory; one of the command line the
    other way round. `data.tokenizer` may be a hub id, so only what begins like a path has to exist. With
    `are_elsewhere` an absolute path may be one of another machine.
    """
    faults = []
    bases = [spec_path.absolute().parent, Path.cwd()]
    for section_name, key in _PATHS:
        section = value.get(section_name)
        written = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(written, str):
            continue
        order = bases[::-1] if f"{section_name}.{key}" in overridden else bases
        found = existing_path(written, order)
        if found is not None:
            value[section_name] = {**section, key: str(found)}
        elif are_elsewhere and Path(written).is_absolute():
            continue
        elif key == "path" or written.startswith(("/", ".", "~")):
            looked = " or ".join(dict.fromkeys(str(base) for base in order))
            where = "" if Path(written).is_absolute() else f" in {looked}"
            text = f"no file or folder {written!r}{where}; mend the path"
            faults.append(places.fault((section_name, key), text))
    return faults


def existing_path(written: str, bases: Iterable[Path]) -> Path | None:
    """The first file or folder `written` under `bases`, absolute; None without one."""
    try:
        path = Path(written).expanduser()
        for base in bases:
            if (base / path).exists():
                return (base / path).resolve()
    except (OSError, RuntimeError, ValueError):
        # a name too long for the file system, an unknown user or a NUL byte: no such file
        return None
    return None


def check_spec(spec: SweepSpec, places: Places, allow_remote_code: bool) -> list[Fault]:
    """Faults between sections of a spec whose fields are all valid."""
    faults = []
    if spec.model.trust_remote_code and not allow_remote_code:
        text = "runs code that comes with the model; pass --allow-remote-code too, or write false"
        faults.append(places.fault(("model", "trust_remote_code"), text))
    if spec.measure.min_steps > spec.measure.max_steps:
        text = f"min_steps {spec.measure.min_steps} is greater than max_steps {spec.measure.max_steps}; swap them"
        faults.append(places.fault(("measure", "min_steps"), text))
    sizes = spec.resources.world_sizes
    if all(spec.train.global_batch % size for size in sizes):
        devices = ", ".join(map(str, sizes))
        multiple = f"write a multiple of {devices}" if len(sizes) == 1 else "write a multiple of one of them"
        text = f"{spec.train.global_batch} is not divisible by devices_per_trial {devices}; {multiple}"
        faults.append(places.fault(("train", "global_batch"), text))
    metrics = [objective.metric for objective in spec.objective]
    for position, metric in enumerate(metrics):
        if metric in metrics[:position]:
            faults.append(places.fault(("objective", position), f"{metric} stands twice; keep one"))
    faults += _device_faults(spec, places) + _quality_faults(spec, places) + _cost_faults(spec, places)
    return faults + (_search_faults(spec, spec.search, places) if spec.search else [])


def _device_faults(spec: SweepSpec, places: Places) -> list[Fault]:
    device = spec.resources.device
    if device in ANY_DEVICES:
        return []
    from orchestrator.spec.hardware import BY_KEY  # brings numpy in

    if device in BY_KEY:
        return []
    text = f"{device!r} is not auto, cpu, cuda or a key of the device table; {did_you_mean(device, BY_KEY)}"
    return [places.fault(("resources", "device"), text)]


def _quality_faults(spec: SweepSpec, places: Places) -> list[Fault]:
    """Whoever judges by the eval loss has to say how it is measured, and against what."""
    faults = []
    mend = "add measure.quality, e.g. measure: {quality: {train_tokens: 20000, eval_rows: 32}}"
    if spec.measure.quality is None:
        for position, objective in enumerate(spec.objective):
            if objective.metric == "eval_loss":
                faults.append(places.fault(("objective", position), f"eval_loss is not measured; {mend}"))
    if spec.limits.eval_loss_within is not None:
        path = ("limits", "eval_loss_within")
        if spec.measure.quality is None:
            faults.append(places.fault(path, f"the eval loss is not measured; {mend}"))
        if spec.search is None or spec.search.baseline is None:
            text = "compares with the baseline, and there is none; add search.baseline, the configuration in use today"
            faults.append(places.fault(path, text))
    return faults


def _cost_faults(spec: SweepSpec, places: Places) -> list[Fault]:
    """A sum needs a price; a pass over data of which rows are left out has no length."""
    faults = []
    if spec.budget.money is not None and spec.resources.price_per_device_hour is None:
        text = (
            "what a device-hour costs is not known; add resources: {price_per_device_hour: 2.50}, "
            "or the path of a cluster profile that states it"
        )
        faults.append(places.fault(("budget", "money"), text))
    if spec.train.planned_epochs is not None and spec.data.max_rows is not None:
        text = "data.max_rows leaves rows out, so the length of an epoch is not known; write planned_tokens"
        faults.append(places.fault(("train", "planned_epochs"), text))
    return faults


def _search_faults(spec: SweepSpec, search: SearchSection, places: Places) -> list[Fault]:
    faults = []
    groups: dict[str, frozenset[str]] = {}
    for position, entry in enumerate(search.paired):
        members = frozenset(entry)
        for name in entry:
            path = ("search", "paired", position, name)
            if name in spec.train.fixed or name in search.knobs:
                home = "train" if name in spec.train.fixed else "search"
                faults.append(places.key_fault(path, f"is paired here and stands in {home} too; keep one of them"))
            elif groups.setdefault(name, members) != members:
                other = ", ".join(sorted(groups[name]))
                text = f"is paired with other knobs elsewhere ({other}); give all its entries the same knobs"
                faults.append(places.key_fault(path, text))
        if entry in search.paired[:position]:
            faults.append(places.fault(("search", "paired", position), "this entry stands twice; keep one"))
    return faults
