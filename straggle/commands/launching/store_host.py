"""The job's store outside of the workers: where it is, serving it, and finding it from another machine."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_CONNECT_S = 5.0


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is: ``host`` is a name or an address."""

    host: str
    port: int

    @staticmethod
    def of(text: str) -> StoreAddress:
        """Read ``HOST:PORT``, where the host may be ``[::1]``; raises ``ValueError`` for anything else."""
        host, _, port = text.rpartition(":")
        if not host or set("/ @") & set(host) or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is no HOST:PORT, such as node0:29500")
        return StoreAddress(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ServedStore:
    """A job's store that serves others for as long as this is kept; ``near`` is where this machine itself finds it."""

    server: TCPStore
    near: StoreAddress


def serve_store(endpoint: StoreAddress) -> ServedStore:
    """Serve a job's store at this endpoint; port 0 takes a free one.

    An address that this machine alone can reach is served there only, and for any other host all of its addresses are.
    The socket has one family: with a mixed one the store asks a name server for each client.
    """
    family, address = _family_and_address(endpoint.host)
    listener = socket.create_server((address, endpoint.port), family=family, backlog=_BACKLOG)
    near = StoreAddress(address or ("::1" if family == socket.AF_INET6 else LOOPBACK), listener.getsockname()[1])
    server = TCPStore(near.host, near.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return ServedStore(server, near)


def connect(endpoint: StoreAddress) -> TCPStore:
    """A connection to the store there."""
    return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))


def no_answer(endpoint: StoreAddress) -> str:
    """Why nothing there can be reached; nothing if something listens."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # the second: a name that no name server could know
        return str(error)
    return ""


def _family_and_address(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:  # a name that is not known yet on its own machine, as in Kubernetes
        return socket.AF_INET, ""
    family, address = found[0][0], str(found[0][4][0])
    return family, address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else ""
