"""Cluster profiles: what machines there are, written as YAML in `clusters/`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from orchestrator.contract.config import Frozen
from orchestrator.contract.units import format_bytes, parse_size
from orchestrator.spec.document import read_document
from orchestrator.spec.hardware import BY_KEY, Device
from orchestrator.spec.knobs import whole
from orchestrator.spec.places import did_you_mean
from orchestrator.spec.sweep import Bytes
from orchestrator.spec.validation import validate

CPU = "cpu"


def _rate(value: Any) -> Any:
    """Bytes per second of `600GB/s`."""
    if not isinstance(value, str):
        return value
    if not value.endswith("/s"):
        raise ValueError(f"{value!r} is not a rate; write it like 600GB/s")
    return parse_size(value.removesuffix("/s"))


class Link(Frozen):
    """How devices, or nodes, exchange data. `bandwidth` in bytes per second, for one device or one node, both
    directions together."""

    kind: Literal["nvlink", "pcie", "infinity-fabric", "infiniband", "ethernet", "memory"]
    bandwidth: Annotated[int, BeforeValidator(_rate), Field(gt=0)]


class Nodes(Frozen):
    """`count` machines of one kind. `device` is a key of `orchestrator.spec.hardware`, or `cpu`."""

    count: int = Field(default=1, ge=1)
    device: str
    devices: int = Field(ge=1)
    """Devices of each node; CPU slots where `device` is cpu."""
    device_memory: Bytes | None = None
    """The nominal size. None: the table's figure; for cpu, no bound but the spec's own limit."""
    allocatable_device_memory: Bytes | None = None
    """What a trial can have of it, beside the driver's share. None: the table's figure of what PyTorch reports."""
    host_memory: Bytes
    allocatable_host_memory: Bytes | None = None
    """What the machine's limits (a container's, a memory cgroup's) leave of it. None: all."""
    local_disk: Bytes | None = None
    """For offload to NVMe."""
    link: Link
    """Between the devices of one node."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        if device != CPU and device not in BY_KEY:
            raise ValueError(f"{device!r} is not in the device table; {did_you_mean(device, [CPU, *BY_KEY])}")
        return device

    @property
    def hardware(self) -> Device | None:
        """The device's row in the table; None for cpu."""
        return BY_KEY.get(self.device)

    @property
    def device_memory_bytes(self) -> int | None:
        """Capacity of one device: the profile's own figure, or the table's; None for cpu without a figure."""
        if self.device_memory is not None:
            return self.device_memory
        return self.hardware.memory_bytes if self.hardware else None

    @property
    def allocatable_device_bytes(self) -> int | None:
        """What a trial can have of one device; None for cpu without a figure."""
        if self.allocatable_device_memory is not None:
            return self.allocatable_device_memory
        if self.device_memory is not None:
            return self.device_memory
        return self.hardware.usable_memory_bytes if self.hardware else None

    @property
    def allocatable_host_bytes(self) -> int:
        """What the trials on one node can have of its memory together."""
        return self.allocatable_host_memory if self.allocatable_host_memory is not None else self.host_memory

    @model_validator(mode="after")
    def _allocatable_is_part(self) -> "Nodes":
        pairs = (
            ("device_memory", self.allocatable_device_memory, self.device_memory_bytes),
            ("host_memory", self.allocatable_host_memory, self.host_memory),
        )
        for name, part, whole_bytes in pairs:
            if part is not None and whole_bytes is not None and part > whole_bytes:
                raise ValueError(
                    f"allocatable_{name} is {format_bytes(part)}, more than {name} ({format_bytes(whole_bytes)}); "
                    "lower it, or leave it out"
                )
        return self


class ClusterProfile(Frozen):
    """A whole cluster. `price_per_device_hour` is in US dollars; `address` is Ray's, None to start it here; `start`
    says in words or commands how it comes up."""

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    description: str = ""
    address: str | None = None
    start: str = ""
    nodes: tuple[Nodes, ...] = Field(min_length=1)
    between_nodes: Link | None = None
    price_per_device_hour: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _nodes_are_joined(self) -> "ClusterProfile":
        if sum(nodes.count for nodes in self.nodes) > 1 and self.between_nodes is None:
            raise ValueError("has several nodes; add between_nodes: {kind: infiniband, bandwidth: 50GB/s}")
        return self

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return sum(nodes.count * nodes.devices for nodes in self.nodes)


def load_cluster(path: Path) -> ClusterProfile:
    """The profile at `path`. Raises SpecError with one line a fault, as `orchestrator.spec.load.load_spec` does."""
    document = read_document(path)
    if not isinstance(document.value, dict):
        raise document.places.error(1, 1, "is not a mapping; begin with version, name and nodes")
    value = {key: whole(item) for key, item in document.value.items()}
    return validate(ClusterProfile, value, document.places, [])
