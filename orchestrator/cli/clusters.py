"""`cluster inspect`, `list` and `show`: what machines there are."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from orchestrator import wiring
from orchestrator.cli.output import Output
from orchestrator.contract.errors import SpecError, UsageError
from orchestrator.contract.handoff import write_atomic
from orchestrator.contract.units import format_bytes
from orchestrator.placement.inspected import inspection, profile_text
from orchestrator.report.tables import NOTHING, Table
from orchestrator.report.terminal import terminal_table
from orchestrator.spec.cluster import ClusterProfile, Link, Nodes, load_cluster


@dataclass(frozen=True)
class InspectRequest:
    """`address` None: this machine. `output` None: standard output."""

    address: str | None
    output: Path | None
    name: str | None
    force: bool


def inspect_cluster(request: InspectRequest, as_json: bool) -> None:
    """Write the profile. Raises UsageError where the file may not be written, ClusterUnreachableError."""
    output, file = Output(as_json), request.output
    if file is not None and file.exists() and not request.force:
        raise UsageError(f"{file} exists already; choose another name, or replace it with --force")
    if file is not None and not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first")
    name = request.name or (file.stem if file is not None else "cluster")
    found = inspection(name, request.address, wiring.inspected_nodes(request.address))
    output.document(found.profile.model_dump(mode="json") | {"remarks": list(found.remarks)})
    if file is None:
        output.show(profile_text(found).rstrip("\n"))
        return
    write_atomic(file, profile_text(found))
    for remark in found.remarks:
        output.say(remark)
    output.show(f"Wrote {file}. Next: brimful cluster show {file}")


def show_profiles(folder: Path, as_json: bool) -> None:
    """A line for each profile in `folder`; one that cannot be read is named with what is wrong."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name the folder of the profiles")
    output, profiles, broken = Output(as_json), list[tuple[Path, ClusterProfile]](), list[str]()
    for file in sorted(folder.glob("*.yaml")):
        try:
            profiles.append((file, load_cluster(file)))
        except SpecError as error:
            broken.append(str(error))
    documents: list[JsonValue] = [{**_document(profile), "file": str(file)} for file, profile in profiles]
    output.document(documents)
    columns = ("profile", "devices", "kind", "memory", "allocatable", "link", "$/device-hour")
    cells = tuple(
        (
            str(file),
            str(profile.devices),
            " + ".join(f"{nodes.count} x {nodes.devices} {nodes.device}" for nodes in profile.nodes),
            _size(profile.nodes[0].device_memory_bytes),
            _size(profile.nodes[0].allocatable_device_bytes),
            _link(profile.nodes[0].link),
            _price(profile),
        )
        for file, profile in profiles
    )
    output.show(terminal_table(Table("", columns, cells, left=frozenset({"profile", "kind", "link"}))))
    for line in broken:
        output.say(line)


def show_profile(file: Path, as_json: bool) -> None:
    """All that one profile says. Raises SpecError with its place and mend where it is wrong."""
    output, profile = Output(as_json), load_cluster(file)
    output.document(_document(profile))
    output.show(f"{profile.name}: {profile.description or 'no description'}")
    columns = ("nodes", "devices", "memory", "allocatable", "host memory", "of it", "local disk", "link")
    cells = tuple(_cells(nodes) for nodes in profile.nodes)
    output.show(terminal_table(Table("", columns, cells, left=frozenset({"link"}))))
    if profile.between_nodes is not None:
        output.show(f"between nodes: {_link(profile.between_nodes)}")
    output.show(f"price: {_price(profile)} US dollars a device-hour")
    output.show(f"address: {profile.address or 'none: Brimful starts Ray here'}")
    if profile.start:
        output.show(f"to bring it up:\n{profile.start.rstrip()}")


def _cells(nodes: Nodes) -> tuple[str, ...]:
    return (
        str(nodes.count),
        f"{nodes.devices} {nodes.device}",
        _size(nodes.device_memory_bytes),
        _size(nodes.allocatable_device_bytes),
        _size(nodes.host_memory),
        _size(nodes.allocatable_host_bytes),
        _size(nodes.local_disk),
        _link(nodes.link),
    )


def _document(profile: ClusterProfile) -> dict[str, JsonValue]:
    content: dict[str, JsonValue] = profile.model_dump(mode="json")
    return content | {"total_devices": profile.devices}


def _size(size_bytes: int | None) -> str:
    return NOTHING if size_bytes is None else format_bytes(size_bytes)


def _link(link: Link) -> str:
    return f"{link.kind} {link.bandwidth / 1e9:,.0f} GB/s"


def _price(profile: ClusterProfile) -> str:
    return NOTHING if profile.price_per_device_hour is None else f"{profile.price_per_device_hour:.2f}"
