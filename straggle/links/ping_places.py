"""Where the ranks answer pings, and the word by which they know each other, in the job's store."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from straggle.links.ping import TOKEN_BYTES
from straggle.merge.wire.store import JobStore, peek

_TOKEN = "ping token"


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
