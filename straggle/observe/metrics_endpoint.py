"""How metrics leave a process: an HTTP endpoint, a file with its address for Prometheus, and a Pushgateway."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from straggle.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, make_wsgi_app, push_to_gateway
    from prometheus_client.exposition import ThreadingWSGIServer, basic_auth_handler, default_handler

_log = logging.getLogger(__name__)
_NUM_PORTS = 100  # that are tried, one after another
_CLIENT_S = 10.0  # that a client may take for all of it
_NUM_CLIENTS = 8  # at a time
_PACE_S = 0.05  # between two clients

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True)
class Security:
    """Who may read the metrics: TLS with ``certfile`` and ``keyfile``, a ``client_cafile`` that clients' certificates
    must come from, and a name and password (the content of a file) for basic authentication.
    """

    certfile: str | None = None
    keyfile: str | None = None
    client_cafile: str | None = None
    username: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        _check_together(certfile=self.certfile, keyfile=self.keyfile)
        if self.client_cafile is not None and self.certfile is None:
            raise ValueError("client_cafile without certfile: certificates of clients are part of TLS")
        _check_login(self.username, self.password_file)

    def context(self) -> ssl.SSLContext | None:
        """The context for TLS, or ``None``. Raises ``OSError`` for files that cannot be read."""
        if self.certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certfile, self.keyfile)
        if self.client_cafile is not None:
            context.load_verify_locations(self.client_cafile)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def guard(self, app: WsgiApp) -> WsgiApp:
        """The application, behind the password if there is one."""
        if self.username is None:
            return app
        expected = base64.b64encode(f"{self.username}:{_password(self.password_file)}".encode())

        def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
            if scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode("latin-1"), expected):
                return app(environ, start_response)
            challenge = [("WWW-Authenticate", 'Basic realm="straggle"'), ("Content-Type", "text/plain")]
            start_response("401 Unauthorized", challenge)
            return [b"name and password, please\n"]

        return guarded


def check_port(port: int | None) -> None:
    """Raise ``ValueError`` if this is neither a port nor ``None``."""
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16):
        raise ValueError(f"port={port}: must be an integer from 0 (any that is free) to 65535, or null for none")


class Endpoint:
    """Serves a registry at ``host`` and ``port``, or the next port that is free; port 0 takes any.

    A client that takes more than ten seconds by ``clock`` is dropped. At most eight are served at a time, and at most
    twenty are accepted in a second. Raises ``OSError`` if no port is free, or for files of ``security`` that cannot be
    read.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        security: Security,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        app, context = security.guard(make_wsgi_app(registry)), security.context()
        self._server = _bind(host, port)
        self._server.context, self._server.clock = context, clock
        self._server.set_app(app)
        self.host, self.port = host, int(self._server.server_port)
        self.scheme = "http" if context is None else "https"
        threading.Thread(target=self._server.serve_forever, name="straggle-metrics-http", daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the metrics on this machine."""
        return f"{self.scheme}://{_joined(self.host, self.port)}/metrics"

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
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


@dataclass(frozen=True)
class Push:
    """Pushes to the Pushgateway at ``url`` every ``every_s`` seconds and at the end, for jobs that cannot be scraped.

    The grouping key is ``rank`` and ``labels``. ``password_file`` holds the password for ``username``.
    """

    url: str | None = None
    job: str = "straggle"
    every_s: float = 15.0
    labels: Mapping[str, str] = field(default_factory=dict)
    username: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ValueError(f"every_s={self.every_s}: must be a positive number of seconds")
        _check_login(self.username, self.password_file)

    def push(self, registry: CollectorRegistry, rank: int) -> None:
        """Push once. Raises ``OSError`` if the gateway does not accept it."""
        assert self.url is not None
        handler = default_handler
        if self.username is not None:
            handler = partial(basic_auth_handler, username=self.username, password=_password(self.password_file))
        push_to_gateway(
            self.url,
            job=self.job,
            registry=registry,
            grouping_key={**self.labels, "rank": str(rank)},
            timeout=_CLIENT_S,
            handler=handler,
        )


class _Server(ThreadingWSGIServer):
    """A thread for each client, as in `prometheus_client`, but for few at a time: they take time from training.

    The library serves any number of clients for any time, and a client that does not end its TLS handshake stops all
    others. Here a client that takes too long is dropped. If there are too many, the oldest one is dropped: an honest
    scrape takes milliseconds. New clients are accepted at a limited rate: a crowd waits in the kernel, where it costs
    nothing.
    """

    request_queue_size = 16  # of clients that may have given up by the time it is their turn
    context: ssl.SSLContext | None = None
    clock: Callable[[], float]

    def __init__(self, *arguments: Any) -> None:
        self._since: dict[socket.socket, float] = {}  # when each client came, the longest first
        self._clients = threading.Lock()  # over the above: who has left it may be closed
        super().__init__(*arguments)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own asks a name server for the host's full name
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        if self.context is not None:
            client = self.context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._clients:
            if len(self._since) >= _NUM_CLIENTS:
                self._drop(next(iter(self._since)))
            self._since[request] = self.clock()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by ``serve_forever`` after each client, and twice a second."""
        with self._clients:
            for client in [client for client, since in self._since.items() if self.clock() - since > _CLIENT_S]:
                self._drop(client)
        time.sleep(_PACE_S)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is not None:
            request.do_handshake()
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._clients:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._clients:
            for client in list(self._since):
                self._drop(client)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        _log.debug("a client of the metrics, %s, went away", client_address, exc_info=True)

    def _drop(self, client: socket.socket) -> None:
        """Wakes its thread, which closes it."""
        del self._since[client]
        with suppress(OSError):  # it is gone already
            socket.socket.shutdown(client, socket.SHUT_RDWR)  # not TLS' own, which its thread is in


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Do not write a line for every scrape."""


def _bind(host: str, port: int) -> _Server:
    last = min(port + _NUM_PORTS, 2**16) - 1 if port else 0
    problem: OSError | None = None
    for candidate in range(port, last + 1):
        family, _, _, _, address = socket.getaddrinfo(
            host or None, candidate, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        kind = type("_Server", (_Server,), {"address_family": family})
        try:
            server: _Server = kind(address[:2], _SilentHandler)
        except OSError as error:
            problem = error
        else:
            return server
    raise OSError(f"no port of {host} from {port} to {last} is free for metrics: {problem}")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_together(**pair: str | None) -> None:
    if len({value is None for value in pair.values()}) > 1:
        raise ValueError(f"{' and '.join(pair)} belong together: give both, or neither")


def _check_login(username: str | None, password_file: str | None) -> None:
    """Raise ``ValueError`` for half of it, or an empty file; an unreadable file is reported where it is needed."""
    _check_together(username=username, password_file=password_file)
    if password_file is not None:
        with suppress(OSError):
            _password(password_file)


def _password(path: str | None) -> str:
    assert path is not None
    if not (password := Path(path).read_text().strip()):
        raise ValueError(f"password_file={path}: it is empty; write the password into it")
    return password
