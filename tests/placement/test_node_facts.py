"""What a machine says of itself: NVML by a stand-in that answers as the driver does, cgroups and sysfs by files."""

import sys
import types
from pathlib import Path

import pytest

from orchestrator.contract.units import GIB, MIB
from orchestrator.placement import node_facts
from orchestrator.placement.node_facts import DeviceFacts, LinkFacts, cgroup_limit_bytes

NVLINK_3_0, NVLINK_4_0, NVLINK_2_0 = 4, 6, 2
"""nvml.h, NVML_NVLINK_VERSION_*."""


class NVMLError(Exception):
    pass


class LibraryNotFound(NVMLError):
    pass


class Nvml(types.ModuleType):
    """Cards of one kind. `nvlinks`: how many links of each are up, and their generation as NVML numbers it."""

    NVML_NVLINK_MAX_LINKS = 36
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    nvmlMemory_v2 = 0x02000028
    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = LibraryNotFound

    def __init__(
        self,
        name: str,
        count: int,
        nvlinks: tuple[int, int] = (0, 0),
        pcie: tuple[int, int] = (4, 16),
        level: int = 50,
        joined: bool = True,
    ) -> None:
        super().__init__("pynvml")
        self._name, self._count, self._nvlinks, self._pcie = name, count, nvlinks, pcie
        self._level, self._joined = level, joined
        self.is_missing = False

    def nvmlInit(self) -> None:
        if self.is_missing:
            raise LibraryNotFound

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._name

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> types.SimpleNamespace:
        assert version == self.nvmlMemory_v2
        reserved = 700 * MIB
        return types.SimpleNamespace(total=80 * GIB, reserved=reserved, used=0, free=80 * GIB - reserved)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if self._nvlinks[0] == 0 or link >= self._nvlinks[0] + 1:
            raise NVMLError("Invalid Argument")
        return 1 if link < self._nvlinks[0] else 0

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self._nvlinks[1]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        assert one != other
        return self._level if {one, other} == {0, self._count - 1} else 10

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0 if self._joined or {one, other} == {0, 1} else 5

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self._pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._pcie[1]


@pytest.mark.parametrize(
    ("nvml", "link"),
    [
        (Nvml("A100", 8, (12, NVLINK_3_0)), LinkFacts(kind="nvlink", bandwidth=600 * 10**9, path="across the sockets")),
        (Nvml("V100", 8, (6, NVLINK_2_0)), LinkFacts(kind="nvlink", bandwidth=300 * 10**9, path="across the sockets")),
        (Nvml("H200", 1, (18, NVLINK_4_0)), LinkFacts(kind="nvlink", bandwidth=900 * 10**9)),
        (
            Nvml("A10", 2, pcie=(4, 16), level=20),
            LinkFacts(kind="pcie", bandwidth=64 * 10**9, path="over several PCIe switches"),
        ),
        (Nvml("T4", 1, pcie=(3, 16)), LinkFacts(kind="pcie", bandwidth=32 * 10**9)),
        (
            # bridges join pairs of cards alone
            Nvml("3090", 4, (4, NVLINK_3_0), joined=False, level=40),
            LinkFacts(kind="pcie", bandwidth=64 * 10**9, path="within one NUMA node"),
        ),
    ],
    ids=["8xA100", "8xV100", "H200", "2xA10", "T4", "4x3090 in pairs"],
)
def test_links_are_told_by_what_is_up_and_who_is_joined(
    nvml: Nvml, link: LinkFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = node_facts.node_facts()
    assert facts.link == link
    assert facts.devices == (
        DeviceFacts(name=nvml._name, memory_bytes=80 * GIB, allocatable_bytes=80 * GIB - 700 * MIB),
    ) * len(facts.devices)
    assert len(facts.devices) == nvml._count


def test_a_machine_without_a_driver_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml("none", 0)
    nvml.is_missing = True
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = node_facts.node_facts()
    assert (facts.devices, facts.link) == ((), None)
    assert facts.cores >= 1
    assert 0 < facts.allocatable_host_bytes <= facts.host_memory_bytes
    assert facts.memory_copy_bytes_per_s > 0
    assert facts.free_disk_bytes <= facts.disk_bytes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_cgroup_limit_counts_in_both_versions(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "0::/pod/container\n")
    write(root / "memory.max", "max\n")
    assert cgroup_limit_bytes(proc, root) is None
    write(root / "pod/memory.max", f"{8 * GIB}\n")
    write(root / "pod/container/memory.max", f"{16 * GIB}\n")
    assert cgroup_limit_bytes(proc, root) == 8 * GIB

    write(proc, "9:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    write(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_limit_bytes(proc, root) is None
    # in a container the path is the host's, and its own limit stands at the root
    write(root / "memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert cgroup_limit_bytes(proc, root) == 4 * GIB
    assert cgroup_limit_bytes(tmp_path / "none", root) is None


def test_networks_are_told_by_their_ports(tmp_path: Path) -> None:
    assert node_facts._network(tmp_path) == ("", 0, False)
    write(tmp_path / "net/eth0/speed", "25000\n")
    write(tmp_path / "net/eth0/device/vendor", "0x8086\n")
    write(tmp_path / "net/docker0/speed", "100000\n")
    write(tmp_path / "net/eth1/speed", "-1\n")
    write(tmp_path / "net/eth1/device/vendor", "0x8086\n")
    assert node_facts._network(tmp_path) == ("eth0", 2 * 25 * 10**9 // 8, False)
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / card / "ports/1"
        write(port / "rate", "400 Gb/sec (4X NDR)\n")
        write(port / "state", f"{state}\n")
        write(port / "link_layer", "InfiniBand\n")
    assert node_facts._network(tmp_path) == ("mlx5_1", 2 * 2 * 400 * 10**9 // 8, True)
