"""What predictions need to know of where trials run: memory, rates, and what a process takes beside its tensors."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.config import Layout, Precision
from orchestrator.contract.facts import Facts
from orchestrator.predict.constants import CPU_CLOCK, CUDA_CLOCK, ClockConstants
from orchestrator.predict.job import Job
from orchestrator.predict.machine import (
    LOOPBACK_BYTES_PER_S,
    Links,
    Processor,
    cpu_links,
    cpu_processor,
    device_links,
    processor,
)
from orchestrator.predict.overhead import Overhead, default_overhead
from orchestrator.predict.terms import total
from orchestrator.spec.hardware import BETWEEN_NODES, Device, lookup
from orchestrator.spec.sweep import SweepSpec

DEFAULT_BETWEEN_NODES = "infiniband-hdr"
"""One 200 Gbit/s port a node, where nothing is said."""


@dataclass(frozen=True)
class Platform:
    """One kind of device in one kind of node. Without `processor` and `links` no speed is predicted.

    `capacity_bytes` is all of a device, `limit_bytes` what a trial's allocator may take of it; of
    either, `headroom_bytes` have to stay free. None: no such bound.
    """

    device: Literal["cuda", "cpu"]
    ranks_on_node: int
    overhead: Overhead
    constants: ClockConstants
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    headroom_bytes: int = 0
    host_limit_bytes: int | None = None
    """Of one node with all its ranks. None: no such bound, or on CPU, where `limit_bytes` holds it."""
    processor: Processor | None = None
    links: Links | None = None

    def capacity_for(self, job: Job) -> int | None:
        """Bytes of the device that `job` may use, what lies outside of the allocator included. On CPU the limit is on
        all that the process takes."""
        beside_bytes = total(self.overhead.device_terms(job)) if self.device == "cuda" else 0
        bounds = [self.capacity_bytes, None if self.limit_bytes is None else self.limit_bytes + beside_bytes]
        known = [bound for bound in bounds if bound is not None]
        return max(0, min(known) - self.headroom_bytes) if known else None


def sweep_platform(
    spec: SweepSpec, facts: Facts, threads_per_rank: int, layout: Layout, devices_on_node: int | None = None
) -> Platform:
    """Where the trials of `spec` with `layout` run, as its preflight found it, on nodes that have at most
    `devices_on_node` (None: as many as a trial wants). Links are the table's, for the device's usual host."""
    packed = min(layout.world_size, devices_on_node or layout.world_size)
    ranks_on_node = packed if layout.nodes is None else layout.world_size // layout.nodes
    rates: Processor | None = None
    links: Links | None = None
    limits_bytes = [spec.limits.device_memory]
    if facts.device == "cpu":
        peaks = facts.peak_flops_per_s
        rates = cpu_processor(peaks, threads_per_rank) if Precision.FP32 in peaks else None
        links = cpu_links(ranks_on_node * threads_per_rank, node_bytes_per_s=LOOPBACK_BYTES_PER_S)
        # there the host's memory is the device's: each rank may take its share
        limits_bytes += [spec.limits.host_memory // ranks_on_node] if spec.limits.host_memory is not None else []
    elif (device := lookup(facts.device_name)) is not None:
        rates, links = processor(device), device_links(device, BETWEEN_NODES[DEFAULT_BETWEEN_NODES])
    return Platform(
        device=facts.device,
        ranks_on_node=ranks_on_node,
        overhead=default_overhead(facts.device),
        constants=CPU_CLOCK if facts.device == "cpu" else CUDA_CLOCK,
        capacity_bytes=facts.device_memory_bytes,
        limit_bytes=min((limit for limit in limits_bytes if limit is not None), default=None),
        headroom_bytes=spec.limits.headroom,
        host_limit_bytes=spec.limits.host_memory if facts.device == "cuda" else None,
        processor=rates,
        links=links,
    )


def table_platform(
    device: Device, ranks_on_node: int, capacity_bytes: int | None, between_nodes_bytes_per_s: float
) -> Platform:
    """A node of `device`s. `capacity_bytes` of each: another figure than the table's usable memory."""
    return Platform(
        device="cuda",
        ranks_on_node=ranks_on_node,
        overhead=default_overhead("cuda"),
        constants=CUDA_CLOCK,
        capacity_bytes=device.usable_memory_bytes if capacity_bytes is None else capacity_bytes,
        processor=processor(device),
        links=device_links(device, between_nodes_bytes_per_s),
    )


def cpu_platform(ranks_on_node: int, capacity_bytes: int | None) -> Platform:
    """Ranks on cores whose rates are not known."""
    return Platform(
        device="cpu",
        ranks_on_node=ranks_on_node,
        overhead=default_overhead("cpu"),
        constants=CPU_CLOCK,
        capacity_bytes=capacity_bytes,
    )
