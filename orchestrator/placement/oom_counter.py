"""The kernel's count of processes that a memory cgroup has killed: evidence for a host out-of-memory."""

from pathlib import Path

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")


class OomCounter:
    """Tells whether `oom_kill` of one cgroup rose since `mark`. Source: Linux, cgroup-v1/memory.rst, cgroup-v2.rst."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._marked = self._count()

    @classmethod
    def of_process(cls, pid: int) -> "OomCounter | None":
        """The counter of the memory cgroup that holds `pid`; None where there is none."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except FileNotFoundError:
            return None
        for _, controllers, path in (line.split(":", 2) for line in lines):
            if "memory" in controllers.split(","):
                file = _V1_ROOT / path.lstrip("/") / "memory.oom_control"
            elif not controllers:
                file = _V2_ROOT / path.lstrip("/") / "memory.events"
            else:
                continue
            if file.exists():
                return cls(file)
        return None

    def mark(self) -> None:
        """Count from here on."""
        self._marked = self._count()

    def rise(self) -> str | None:
        """Words for the kills since `mark`, or None when there were none."""
        kills = self._count() - self._marked
        return f"{self.file}: oom_kill rose by {kills}" if kills > 0 else None

    def _count(self) -> int:
        try:
            fields = dict(line.split(None, 1) for line in self.file.read_text().splitlines())
        except FileNotFoundError:
            return 0
        return int(fields.get("oom_kill", 0))
