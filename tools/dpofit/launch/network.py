"""Ports and interfaces of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_in_use(port: int, host: str = "") -> bool:
    """Whether listening on `port` fails because somebody does already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store: lingering closes don't count
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
