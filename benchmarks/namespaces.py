"""Hosts in network namespaces of this machine, between which a forwarder makes links slow: it is given by its path.

The forwarder is ``slownet.py`` with one thing more: a link may be slow for a part of the time only.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

INTERFACE = "sim0"


class Unavailable(Exception):
    """This machine cannot have such hosts; says why."""


def options_of(parser):
    """The command's options, with the path to the forwarder. A benchmark that is told to end takes its hosts away."""
    parser.add_argument("--slownet", default=os.environ.get("SLOWNET"), help="path to slownet.py")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # an exception, which ends what is entered
    return options


@dataclass(frozen=True)
class Slow:
    """What a link does to packets in one direction; seconds, bytes a second, and the share that is lost.

    ``for_s``: only so long, from the beginning on, or with ``every_s`` at the beginning of each such period of
    ``time.monotonic()``; ``while_file``: only while there is this file. Otherwise it is as ``normal_bytes_per_s`` says,
    without delay or loss.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    jitter_s: float = 0.0
    for_s: float = 0.0
    every_s: float = 0.0
    normal_bytes_per_s: float = 0.0
    while_file: str = ""


class ChangingLink:
    """A `Slow` as the forwarder reads it."""

    def __init__(self, **slow):
        self._slow, self._normal = Slow(**slow), Slow(bytes_per_s=slow.get("normal_bytes_per_s", 0.0))
        self._began_at = time.monotonic()
        self.free_at = 0.0

    @property
    def _now(self):
        slow, now = self._slow, time.monotonic()
        if slow.while_file:
            return slow if os.path.exists(slow.while_file) else self._normal
        since_s = now % slow.every_s if slow.every_s else now - self._began_at
        return slow if not slow.for_s or since_s < slow.for_s else self._normal

    delay = property(lambda self: self._now.delay_s)
    rate = property(lambda self: 8 * self._now.bytes_per_s)
    loss = property(lambda self: self._now.loss)
    jitter = property(lambda self: self._now.jitter_s)


@contextlib.contextmanager
def hosts(num_hosts, links, *, forwarder, mtu, network="10.81.0", prefix="pl", niceness=0):
    """The names of the namespaces; ``links`` of some hosts, in both directions, and of ``None``: of all others.

    ``niceness`` of the forwarder: a network does not wait for a processor that others use, as a program does.

    Raises `Unavailable`.
    """
    if not forwarder or not Path(forwarder).exists():
        raise Unavailable("it needs the path to slownet.py (--slownet, or SLOWNET)")
    if os.geteuid() or shutil.which("ip") is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Unavailable("it needs root, the command ip and a TUN device")
    names = [f"{prefix}{os.getpid()}n{number}" for number in range(num_hosts)]
    addresses = [f"{network}.{number + 1}" for number in range(num_hosts)]
    with contextlib.ExitStack() as stack:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                raise Unavailable(f"it may not make network namespaces: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        config = {
            "mtu": mtu,
            "niceness": niceness,
            "hosts": [{"ns": name, "ip": address} for name, address in zip(names, addresses, strict=True)],
            "default": vars(links[None]) if None in links else {},
            "links": [
                {"src": addresses[a], "dst": addresses[b], "q": vars(slow)}
                for host, slow in links.items()
                if host is not None
                for other in range(num_hosts)
                for a, b in ((host, other), (other, host))
            ],
        }
        process = subprocess.Popen(
            [sys.executable, __file__, forwarder, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        if process.stdout.readline() != "ready\n":
            raise Unavailable(f"slownet.py does not run here: {process.stderr.read().splitlines()[-1]}")
        yield names


def enter(name):
    """Let this thread, and those that it starts, live in a namespace; before gloo looks for its interface."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def main():
    spec = spec_from_file_location("slownet", sys.argv[1])
    slownet = module_from_spec(spec)
    sys.modules["slownet"] = slownet  # where its dataclass looks for it
    spec.loader.exec_module(slownet)
    slownet.Link = ChangingLink
    config = json.loads(sys.argv[2])
    os.setpriority(os.PRIO_PROCESS, 0, config["niceness"])
    slownet.forward(config)


if __name__ == "__main__":
    main()
