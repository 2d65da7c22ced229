"""The names of scalars: a row of telemetry holds only numbers, so each name is sent as its hash.

The name of a hash is published in the job's store when it is first logged on any rank, and looked up once by each rank
that meets an unknown hash. A step without new names does not wait for this.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from straggle.merge.wire.channel import Channel


class ScalarNames:
    """The names that one rank knows: those that it has logged, and those that it has looked up.

    ``channel``: where the ranks publish names for one another.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._logged: set[str] = set()
        self._known: dict[float, str] = {}

    def log(self, names: Iterable[str]) -> None:
        """Publish new names. Raises ``ValueError`` for a name with the same hash as another."""
        for name in names:
            if name not in self._logged:
                self._publish(name)

    def of(self, hashes: Iterable[float]) -> dict[float, str]:
        """The names of these hashes; an unknown one is left out if the job's store is gone."""
        with contextlib.suppress(RuntimeError):
            for key in hashes:
                if key not in self._known and (name := self._channel.published_name(int(key))) is not None:
                    self._known[key] = name
        return dict(self._known)

    def _publish(self, name: str) -> None:
        key, first = name_hash(name), name
        with contextlib.suppress(RuntimeError):  # the store is gone: the merge will report it
            first = self._channel.publish_name(int(key), name)
        first = self._known.get(key, first)
        if first != name:
            raise ValueError(
                f"scalars {first!r} and {name!r} have the same hash by chance: give one of them another name"
            )
        self._known[key] = name
        self._logged.add(name)


def name_hash(name: str) -> float:
    """A number for a scalar's name, exact in float32 and never 0, which marks an empty slot."""
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big") | 1)
