"""Machines on this one: namespaces with host names that resolve, a link between them, and a firewall."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from network import Network, made_network
from repository import ROOT

GIGABIT = {"rate": 1e9, "delay": 0.0005}
BY_ENDPOINT = "NNODES=2 RDZV_ENDPOINT=node0:29400 RDZV_ID=job7 ./launch.sh"


def lines_of(page: str, heading: str, language: str) -> list[str]:
    """The lines of the first block of this language under a heading."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2]
    return (section.partition(f"\n```{language}\n")[2].partition("\n```\n")[0]).splitlines()


def commands_of_several_nodes() -> list[str]:
    """Those of the page on clusters, for the first of two machines."""
    found = lines_of("docs/cluster.md", "Several machines", "bash")
    assert len(found) == 3
    return found


def by_hand() -> str:
    """torchrun without launch.sh, as the page on deploying has it."""
    (command,) = re.findall(r"`(torchrun --nnodes 2 .*?)`", (ROOT / "deploy" / "README.md").read_text())
    return str(command)


@dataclass(frozen=True)
class Machine:
    """A namespace of the network with a host name of its own; ``home`` is what its programs are given as HOME."""

    host: str
    namespace: str
    address: str
    home: Path

    def start(self, words: Sequence[str | Path], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """A program on this machine. It has no interface named: gloo finds its address by the host's name."""
        left_out = ("GLOO_SOCKET_IFNAME", "WORKERS", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HOME": str(self.home)}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own_name = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.host)
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *own_name, *map(str, words)],
                cwd=ROOT,
                env=environment | variables,
                stdout=output,
                stderr=output,
            )

    def kill_all(self) -> None:
        """End all of its processes at once, as a machine does that loses its power."""
        look = ["ip", "netns", "pids", self.namespace]
        while pids := subprocess.run(look, check=True, capture_output=True, text=True).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def run(self, command: str) -> str:
        """What a line of a shell prints there."""
        words = ["ip", "netns", "exec", self.namespace, "sh", "-ec", command]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def count_refused(self) -> None:
        """From now on, count what the firewall, whose rules end here, is about to refuse."""
        self.run("iptables -A INPUT -m conntrack --ctstate NEW -j DROP")

    def refused(self) -> int:
        """How many packets came that would have begun a connection that the firewall does not let in."""
        (packets,) = [line.split()[0] for line in self.run("iptables -vnxL INPUT").splitlines() if " NEW" in line]
        return int(packets)


@contextlib.contextmanager
def made_machines(folder: Path, num_machines: int = 2) -> Iterator[tuple[Network, list[Machine]]]:
    """``node0``, ``node1`` and so on, with 1 Gbit/s and 0.5 ms each way between them; whatever runs there is ended.

    Skips the test if this machine cannot have them.
    """
    missing = [name for name in ("unshare", "iptables", "sysctl", "hostname") if shutil.which(name) is None]
    if missing or not os.access("/etc", os.W_OK):
        pytest.skip(f"needs root and the commands {', '.join(missing)}")
    with made_network(num_machines, default=GIGABIT, mtu=9000) as network, contextlib.ExitStack() as stack:
        machines = [
            Machine(f"node{number}", name, address, folder / f"home{number}")
            for number, (name, address) in enumerate(zip(network.names, network.addresses, strict=True))
        ]
        hosts = "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.host}\n" for one in machines)
        for machine in machines:
            machine.home.mkdir()
            stack.callback(shutil.rmtree, f"/etc/netns/{machine.namespace}", ignore_errors=True)
            Path("/etc/netns", machine.namespace).mkdir(parents=True)
            Path("/etc/netns", machine.namespace, "hosts").write_text(hosts)  # `ip netns exec` mounts it
            stack.callback(machine.kill_all)
        yield network, machines
