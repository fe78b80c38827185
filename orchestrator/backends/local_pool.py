"""Trials on this machine without Ray: a `TrialPool` over one warm template a device."""

import os
import select
import socket
import time

from orchestrator.contract.outcome import Cancelled
from orchestrator.placement.cluster import ClusterView, NodeView
from orchestrator.placement.environment import template_environment
from orchestrator.placement.group import Attempt
from orchestrator.placement.lanes import check, place
from orchestrator.placement.local_devices import LocalDevice, cpu_slots, gpus
from orchestrator.placement.ports import free_port
from orchestrator.placement.supervisor import Supervisor, place_name
from orchestrator.placement.template_host import DEFAULT_TEMPLATE, TemplateHost
from orchestrator.sweep.ports import Ended, Launch

POLL_INTERVAL_S = 0.1
"""Upper bound between two looks at the running groups; a reply of a template ends the wait at once."""
_LOOPBACK = "127.0.0.1"


class LocalPool:
    """See `orchestrator.sweep.ports.TrialPool`.

    `devices` is the number of devices to use (None: all GPUs, or without GPUs as many CPU slots of
    `threads_per_device` as there are physical cores). On a machine without GPUs, more slots than cores are allowed.
    """

    def __init__(
        self, devices: int | None = None, threads_per_device: int = 1, template_module: str = DEFAULT_TEMPLATE
    ) -> None:
        self._node = socket.gethostname()
        self._threads = threads_per_device
        self._is_gpu = bool(self._gpus())
        self._devices = self._choose(devices)
        self._hosts = [self._host(device, template_module) for device in self._devices]
        self._supervisor = Supervisor()
        self._used: dict[str, tuple[TemplateHost, ...]] = {}
        self._ports: dict[str, int] = {}

    def cluster(self) -> ClusterView:
        """See `TrialPool`."""
        occupants = self._occupants()
        node = NodeView(
            name=self._node,
            address=_LOOPBACK,
            devices=len(self._devices),
            free_devices=len(self._devices) - len(occupants),
            occupants=tuple(words for all_words in occupants.values() for words in all_words),
        )
        return ClusterView(nodes=(node,), device_kind="GPU" if self._is_gpu else "CPU slot")

    def check(self, world_size: int, nodes: int | None) -> None:
        """See `TrialPool`."""
        check(self.cluster(), world_size, nodes)

    def use(self, kind: str | None) -> None:
        """See `TrialPool`. There is one node, so one kind."""

    def waits_for(self) -> str:
        """See `TrialPool`. The node is this one."""
        return ""

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset(), nodes: int | None = None) -> bool:
        """See `TrialPool`. There is no other node than this one."""
        return len(self._free_hosts()) >= world_size and place(self.cluster(), world_size, None) is not None

    def launch(self, launch: Launch) -> None:
        """See `TrialPool`."""
        hosts = self._free_hosts()[: launch.config.world_size]
        assert len(hosts) == launch.config.world_size, "launch is called only while has_room is true"
        port = free_port(taken=frozenset(self._ports.values()))
        self._ports[launch.token] = port
        self._used[launch.token] = tuple(hosts)
        attempt = Attempt(launch.token, launch.directory.resolve(), launch.config, _LOOPBACK, port)
        self._supervisor.start(attempt, hosts)

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `TrialPool`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self._collect()
            left_s = deadline_s - time.monotonic()
            if ended or left_s <= 0:
                return ended
            descriptors = [host.descriptor for host in self._hosts if host.is_busy and host.descriptor is not None]
            select.select(descriptors, [], [], min(left_s, POLL_INTERVAL_S))

    def cancel(self, token: str) -> None:
        """See `TrialPool`."""
        self._supervisor.end(token, Cancelled())

    def close(self) -> None:
        """See `TrialPool`."""
        for host in self._hosts:
            host.close()

    def _collect(self) -> list[Ended]:
        ended = []
        for finished in self._supervisor.collect():
            del self._used[finished.token], self._ports[finished.token]
            ended.append(Ended(finished.token, finished.outcome, place_name(finished.nodes), finished.nodes))
        return ended

    def _free_hosts(self) -> list[TemplateHost]:
        """Idle hosts that nobody else occupies, warm ones first."""
        busy = {id(host) for hosts in self._used.values() for host in hosts}
        occupied = self._occupants()
        free = [
            (host.descriptor is None, index, host)
            for index, host in enumerate(self._hosts)
            if id(host) not in busy and index not in occupied
        ]
        return [host for _, _, host in sorted(free, key=lambda item: item[:2])]

    def _occupants(self) -> dict[int, tuple[str, ...]]:
        """Who computes on our idle GPUs, by position in `_devices`: nobody of ours does."""
        if not self._is_gpu:
            return {}
        busy = {id(host) for hosts in self._used.values() for host in hosts}
        by_uuid = {gpu.visible: gpu.occupants for gpu in self._gpus()}
        found = {
            index: by_uuid.get(device.visible, ())
            for index, device in enumerate(self._devices)
            if id(self._hosts[index]) not in busy
        }
        return {index: words for index, words in found.items() if words}

    def _choose(self, devices: int | None) -> list[LocalDevice]:
        if self._is_gpu:
            return self._gpus()[:devices]
        if devices is None:
            return cpu_slots(self._threads)
        return [LocalDevice(index) for index in range(devices)]

    def _host(self, device: LocalDevice, module: str) -> TemplateHost:
        environment = template_environment(os.environ, device.visible, self._threads)
        return TemplateHost(self._node, environment, module)

    @staticmethod
    def _gpus() -> list[LocalDevice]:
        return gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
