"""How metrics leave a process: an HTTP endpoint, and a file with its address for Prometheus."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from straggle.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, start_http_server

_NUM_PORTS = 100  # that are tried, one after another
_CLOSE_S = 1.0  # a client that does not end its TLS handshake holds the server's thread, and must not hold the job


@dataclass(frozen=True)
class Security:
    """TLS with ``certfile`` and ``keyfile``, and a ``client_cafile`` that clients' certificates must come from."""

    certfile: str | None = None
    keyfile: str | None = None
    client_cafile: str | None = None

    def __post_init__(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile belong together: give both, or neither")
        if self.client_cafile is not None and self.certfile is None:
            raise ValueError("client_cafile without certfile: certificates of clients are part of TLS")


def check_port(port: int | None) -> None:
    """Raise ``ValueError`` if this is neither a port nor ``None``."""
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16):
        raise ValueError(f"port={port}: must be an integer from 0 (any that is free) to 65535, or null for none")


class Endpoint:
    """Serves a registry at ``host`` and ``port``, or the next port that is free; port 0 takes any.

    Raises ``OSError`` if no port is free, or for files of ``security`` that cannot be read.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int, security: Security) -> None:
        self._server, self._thread = _start(registry, host, port, security)
        self.host, self.port = host, int(self._server.server_port)
        self.scheme = "http" if security.certfile is None else "https"

    @property
    def url(self) -> str:
        """The address of the metrics on this machine."""
        return f"{self.scheme}://{_joined(self.host, self.port)}/metrics"

    def close(self) -> None:
        """Free the port."""
        # by another thread: it waits for the request that is being answered, which may never end
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._thread.join(_CLOSE_S)
        self._server.server_close()


@dataclass(frozen=True)
class Targets:
    """Files for Prometheus' ``file_sd_configs`` with the endpoints' addresses: one ``folder/rank<n>.json`` for each
    rank.

    ``address``: this machine's name or address as Prometheus reaches it; ``None``: the endpoint's host, or the
    machine's name if that host means "all addresses". ``labels``, such as ``run``, are added to every sample.
    """

    folder: str | None = None
    address: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def write(self, rank: int, endpoint: Endpoint) -> None:
        """Write the rank's file; a reader never sees a part of it."""
        if (path := self._path(rank)) is None:
            return
        address = self.address or (socket.gethostname() if endpoint.host in ("", "0.0.0.0", "::") else endpoint.host)
        labels = {**self.labels, **({"__scheme__": "https"} if endpoint.scheme == "https" else {})}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_suffix(".tmp")  # which Prometheus does not read
        partial_file.write_text(json.dumps([{"targets": [_joined(address, endpoint.port)], "labels": labels}]) + "\n")
        os.replace(partial_file, path)

    def remove(self, rank: int) -> None:
        """Remove the rank's file: Prometheus does not expect it any more."""
        if (path := self._path(rank)) is not None:
            path.unlink(missing_ok=True)

    def _path(self, rank: int) -> Path | None:
        return None if self.folder is None else Path(self.folder) / f"rank{rank}.json"


def _start(
    registry: CollectorRegistry, host: str, port: int, security: Security
) -> tuple[WSGIServer, threading.Thread]:
    """The server at the first port that is not in use."""
    last = min(port + _NUM_PORTS, 2**16) - 1 if port else 0
    for candidate in range(port, last + 1):
        try:
            return start_http_server(
                candidate,
                host or "0.0.0.0",
                registry,
                security.certfile,
                security.keyfile,
                security.client_cafile,
                client_auth_required=security.client_cafile is not None,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no port of {host} from {port} to {last} is free for metrics")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
