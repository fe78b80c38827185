"""TCP ports at which rank groups meet."""

import socket


def free_port(taken: frozenset[int] = frozenset()) -> int:
    """A port that is free on all interfaces of this machine and not in `taken`.

    It is released before it is returned: whoever binds it in the meantime wins, and the group fails as `infra`.
    """
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port
