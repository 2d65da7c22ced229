"""Stores that can be made to fail: a server in a process of its own, and a network between it and its clients."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from straggle.commands.launching import store_host

_context = multiprocessing.get_context("forkserver")


def serve_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """A job's store that asks no name server, as torch's own does for each client: who waits for it waits meanwhile."""
    return store_host.serve_store(store_host.StoreAddress(host, port)).server


@dataclass(frozen=True)
class StoreServer:
    """A TCPStore's server, as torchrun's agent is; any process may stop it."""

    pid: int
    port: int

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def join(self, rank: int, world_size: int) -> None:
        """Have the default process group over this store, in place of the one that there is."""
        if dist.is_initialized():
            dist.destroy_process_group()
        store = TCPStore("127.0.0.1", self.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


@contextlib.contextmanager
def store_server(port: int = 0) -> Iterator[StoreServer]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs, port), daemon=True)
    process.start()
    try:
        yield StoreServer(process.pid or 0, ours.recv())
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, port: int) -> None:
    store = serve_store(port=port)
    connection.send(store.port)
    time.sleep(3600)


class Network:
    """What lies between the clients of ``port`` and the store behind ``server_port``: it can be cut, and healed.

    A cut loses for good what goes over the connections that there are, as a router does that was replaced; new ones are
    neither answered nor refused until it is healed.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._up = threading.Event()
        self._up.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._up.clear()

    def heal(self) -> None:
        self._up.set()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._up.wait()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._up.is_set():
                    return
                target.sendall(data)


@contextlib.contextmanager
def network(server: StoreServer) -> Iterator[Network]:
    between = Network(server.port)
    try:
        yield between
    finally:
        between.close()


class Stuck:
    """A store in this process whose requests wait until they are let go; counts those that it was asked."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.asked: list[str] = []
        self._keys: dict[str, Any] = {}

    def check(self, keys: list[str]) -> bool:
        self._wait(f"check {keys}")
        return all(key in self._keys for key in keys)

    def set(self, key: str, value: str) -> None:
        self._wait(f"set {key}")
        self._keys[key] = value

    def _wait(self, what: str) -> None:
        self.asked.append(what)
        self.free.wait()
