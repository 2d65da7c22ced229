"""At which of its addresses a rank is reached by its peers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

from straggle import world
from straggle.merge.wire.store import server_of

_SIOCGIFADDR = 0x8915
_LOCAL = "127.0.0.1"


def own_address(store: Any) -> str:
    """The address of the interface that gloo or nccl was given or, without that, of the way to the job's store."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        interface = os.environ.get(name, "").split(",")[0]
        if interface and (address := _of_interface(interface)):
            return address
    server = server_of(store)
    if isinstance(server, world.dist.TCPStore):  # type: ignore[attr-defined]
        return _towards(server.host, server.port)
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return _LOCAL


def _of_interface(name: str) -> str | None:
    """Its IPv4 address, if the system reports it."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl  # not on all systems

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _towards(host: str, port: int) -> str:
    """This machine's address on the way there; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(address)
            return str(towards.getsockname()[0])
    return _LOCAL
