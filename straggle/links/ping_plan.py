"""When a rank pings whom, with how many bytes, and where that one answers.

Two peers each time: the next and the previous one by rank, and the next time those after these, so that two slow ranks
with one between them are told from three. On another machine, if there is one: ranks of one machine share its link,
and what goes between them does not take it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from straggle import world
from straggle.links.ping import LEAST_BYTES, MOST_BYTES, TOKEN_BYTES
from straggle.merge.wire.store import JobStore, peek, server_of

EVERY_S = 10.0
SLOW_EVERY_S = 2.5  # while a link is slow, so that it is known soon that it is not any more
DOUBT_EVERY_S = 1.0  # while one looks so, until several rounds show it
_LONGEST_S = 60.0
SHARE = 0.001  # of the bytes that merges send
_MERGED_SHARE = 256  # the large message is at most so small a part of what is merged
_MESSAGES = 8  # large ones with each ping: three to each of two peers, and what comes before them
DISTANCES = 2


def largest_bytes(merged_bytes: int) -> int:
    """The large message, if a step merges so much: the same on all ranks, and so is the highest rate.

    A power of two from 64 KB on. With 400 MB of gradients it is 1 MB, which shows rates up to 1 GB/s.
    """
    part = max(1, merged_bytes // _MERGED_SHARE)
    return min(MOST_BYTES // 4, max(LEAST_BYTES, 1 << (part.bit_length() - 1)))


def every_s(merged_bytes: int, step_s: float, num_ranks: int, *, is_slow: bool, in_doubt: bool = False) -> float:
    """Seconds between two pings: as many as keep them below `SHARE` of what merges send, from 10 s to a minute.

    A ring sends 2 (p - 1) / p of the gradients in each step. While a link is slow, or may be, pings are more frequent.
    """
    if in_doubt or is_slow:
        return DOUBT_EVERY_S if in_doubt else SLOW_EVERY_S
    sent_per_s = 2 * (num_ranks - 1) / num_ranks * merged_bytes / max(step_s, 1e-6)
    if sent_per_s <= 0:
        return _LONGEST_S
    return min(_LONGEST_S, max(EVERY_S, _MESSAGES * largest_bytes(merged_bytes) / (SHARE * sent_per_s)))


def peers_of(rank: int, hosts: Mapping[int, str], number: int) -> tuple[int, ...]:
    """Whom this rank pings the ``number``-th time; ``hosts`` of all ranks that answer pings."""
    ranks = sorted(hosts)
    following = [other for other in ranks if other > rank] + [other for other in ranks if other < rank]
    elsewhere = [other for other in following if hosts[other] != hosts.get(rank)]
    others = elsewhere or following
    if not others:
        return ()
    distance = number % min(DISTANCES, (len(others) + 1) // 2)
    return tuple(dict.fromkeys((others[distance], others[-1 - distance])))


def is_turn(step: int, place: int, count: int, overdue_s: float, patience_s: float) -> bool:
    """Whether a rank that is due pings now that ``step`` is merged: one after another, so that no two share a link.

    ``place`` is its number among ``count`` members. One that was not due in its turn for long does not wait for it.
    """
    return step % count == place or overdue_s >= patience_s


_TOKEN = "ping token"


# -- where the ranks answer, and the word by which they know each other, in the job's store


class PingPlaces:
    """What one rank knows of this; asked by the thread that pings. Raises `StoreUnreachable` as the store does."""

    def __init__(self, rank: int, store: JobStore) -> None:
        self.token = b""
        self._rank, self._store = rank, store
        self._places: dict[int, tuple[str, int]] = {}

    def agree(self) -> None:
        """On the word, which is random."""
        own = secrets.token_hex(TOKEN_BYTES)
        word = self._store.ask(lambda store: bytes(store.compare_set(_TOKEN, "", own)))
        self.token = hashlib.sha256(word).digest()

    def publish(self, host: str, port: int) -> None:
        """This rank answers here."""
        self._places[self._rank] = host, port
        key, place = _key(self._rank), f"{port} {host}"
        self._store.ask(lambda store: store.set(key, place))

    def hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        """The hosts of those of these ranks that answer pings."""
        if unknown := [rank for rank in ranks if rank not in self._places]:
            self._places |= self._store.ask(lambda store: _read(store, unknown))
        return {rank: self._places[rank][0] for rank in ranks if rank in self._places}

    def of(self, rank: int) -> tuple[str, int]:
        """Where this rank answers."""
        return self._places[rank]

    def forget(self, rank: int) -> None:
        """It does not answer there: look again next time, because it may have been restarted."""
        self._places.pop(rank, None)


def _key(rank: int) -> str:
    return f"ping/{rank}"


def _read(store: Any, ranks: Sequence[int]) -> dict[int, tuple[str, int]]:
    """The places of those that have published one; what is none is left out."""
    places = {}
    for rank in ranks:
        port, _, host = (peek(store, _key(rank)) or "").partition(" ")
        if port.isdecimal() and 0 < int(port) < 65536 and host:
            places[rank] = host, int(port)
    return places


_SIOCGIFADDR = 0x8915
_LOCAL = "127.0.0.1"


# -- at which of its addresses a rank is reached by its peers


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
