"""Ports that somebody else has taken: another one is used, or one clear line says which."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from pools.conformance import STUB, Home, run

from orchestrator import wiring
from orchestrator.backends.ray_pool import RayPool
from orchestrator.cli.tracking import serve_ui
from orchestrator.contract.errors import UsageError
from orchestrator.contract.outcome import Ok

RAY_PORTS = (6379, 8265, 8076, 10001, 52365, 44217, 44227)
"""Ray's defaults: head, dashboard, objects, client, agent, metrics (docs.ray.io, "Ports configurations")."""


@pytest.fixture
def taken() -> Iterator[None]:
    """Ray's usual ports are somebody else's, as far as they are free now."""
    with ExitStack() as stack:
        for port in RAY_PORTS:
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind(("", port))
                listener.listen()
            except OSError:
                continue
        yield


@pytest.mark.ray
@pytest.mark.fault("C16")
def test_a_private_cluster_starts_beside_whatever_has_rays_ports(
    taken: None, ray_token: None, tests_importable: None, tmp_path: Path
) -> None:
    with closing(RayPool(cpus=1, template_module=STUB)) as pool:
        assert isinstance(run(pool, Home(tmp_path).attempt()), Ok)


@pytest.mark.fault("C16")
def test_pages_at_a_taken_port_are_refused_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "tracking_server", lambda home, port: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} of 127\.0\.0\.1 is taken; choose another with --port"):
            serve_ui(tmp_path, port, browser=False, as_json=False)
