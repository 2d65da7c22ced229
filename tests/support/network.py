"""Hosts in network namespaces of this machine, whose links are slow, or are cut and healed while ranks train."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from repository import ROOT

SLOWNET = ROOT.parent / "shared" / "tools" / "slownet.py"
INTERFACE = "sim0"


@dataclass(frozen=True)
class Network:
    """Names of the namespaces, and the address of each host."""

    names: Sequence[str]
    addresses: Sequence[str]
    process: subprocess.Popen[str]

    def cut(self, host: int) -> None:
        """Take a host off the network: its packets are lost, and its connections do not break."""
        self._say(f"cut {self.addresses[host]}")

    def heal(self, host: int) -> None:
        """And back."""
        self._say(f"heal {self.addresses[host]}")

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def made_network(
    num_hosts: int,
    slow: dict[int, dict[str, float]] | None = None,
    *,
    default: dict[str, float] | None = None,
    mtu: int = 1500,
) -> Iterator[Network]:
    """So many hosts; what those in ``slow`` send and get is so, and for all others ``default`` holds.

    Skips the test where this machine cannot have them.
    """
    names = [f"straggle-{os.getpid()}-{number}" for number in range(num_hosts)]
    if not SLOWNET.exists() or shutil.which("ip") is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("needs slownet.py, the command ip and a TUN device")
    with contextlib.ExitStack() as stack:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"needs the right to make network namespaces: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        addresses = [f"10.78.0.{number + 1}" for number in range(num_hosts)]
        links: list[dict[str, Any]] = []
        for host, q in (slow or {}).items():
            for other in addresses:
                links += [
                    {"src": addresses[host], "dst": other, "q": q},
                    {"src": other, "dst": addresses[host], "q": q},
                ]
        hosts = [{"ns": name, "ip": address} for name, address in zip(names, addresses, strict=True)]
        process = subprocess.Popen(
            [
                sys.executable,
                SLOWNET,
                json.dumps({"hosts": hosts, "links": links, "default": default or {}, "mtu": mtu}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(process)  # which waits for its end, and closes the pipes
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip(f"slownet.py does not run here: {process.stderr.read().splitlines()[-1]}")
        yield Network(names, addresses, process)


def enter(namespace: str) -> None:
    """Let this thread, and those that it starts, live in a namespace; before gloo looks for its interface."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
