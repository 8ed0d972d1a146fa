"""A network of its own for a job under test: one namespace a node, joined by a bridge.

Faults are made where a real network has them, between the nodes: at the bridge's port towards the
destination. A directed link is slowed by `htb` and silenced by the `blackhole` qdisc in one of its
classes, a NIC is slowed by `tbf`, packets are lost by nftables' `numgen`, and a node behind a TAP
relay gets delay and jitter (this kernel may have no `sch_netem`).

Everything a lab makes carries its name `plabPPPPPx`, with the pid of its maker in base 36, so that
`sweep` can remove what a killed run has left behind.
"""

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "plab"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NAME = re.compile(rf"\b{PREFIX}([0-9a-z]{{5}})")
_UNLIMITED = "40gbit"
_COMMAND_S = 300


class LabError(RuntimeError):
    """A command of the lab failed."""


def sh(*words: object, check: bool = True) -> str:
    """Run a command; return its output."""
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    if check and done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _base36(number: int) -> str:
    text = ""
    for _ in range(5):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


def why_not() -> str:
    """Return why there can be no lab here; empty where there can."""
    if os.geteuid():
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no `{tool}` (package iproute2)"
    name = f"{PREFIX}-probe-{os.getpid()}"  # Not a lab's name, so that no sweep removes it.
    try:
        sh("ip", "netns", "add", name)
        pair = ("veth0", "type", "veth", "peer", "name", "veth1")
        sh("ip", "-n", name, "link", "add", *pair)
        sh("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        sh("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "handle", "1:", "htb")
    except (LabError, subprocess.SubprocessError) as error:
        return f"this kernel or container refuses: {error}"
    finally:
        sh("ip", "netns", "del", name, check=False)
    return ""


def why_no_loss() -> str:
    """Return why no packets can be lost on purpose; empty where they can."""
    return "" if shutil.which("nft") else "no `nft` (package nftables)"


def why_no_delay() -> str:
    """Return why no packets can be delayed; empty where they can."""
    return "" if os.path.exists("/dev/net/tun") else "no /dev/net/tun for the relay"


def sweep() -> list[str]:
    """Remove labs whose maker is dead; return their names."""
    if os.geteuid() or shutil.which("ip") is None:
        return []
    text = sh("ip", "netns", "list", check=False) + sh("ip", "-br", "link", check=False)
    stale = []
    for code in sorted(set(_NAME.findall(text))):
        if not os.path.exists(f"/proc/{int(code, 36)}"):
            _remove(PREFIX + code)
            stale.append(PREFIX + code)
    return stale


def _remove(name: str) -> None:
    """Remove all namespaces and links of a lab, whatever of it there is."""
    if shutil.which("nft"):
        sh("nft", "delete", "table", "bridge", name, check=False)
    for line in sh("ip", "netns", "list", check=False).splitlines():
        if line.startswith(name):
            space = line.split()[0]
            for pid in sh("ip", "netns", "pids", space, check=False).split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), 9)
            sh("ip", "netns", "del", space, check=False)
    for line in sh("ip", "-br", "link", check=False).splitlines():
        link = line.split("@")[0].split()[0]
        if link.startswith(name):
            sh("ip", "link", "del", link, check=False)


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """Let one process of this machine build a lab at a time."""
    with open(Path(tempfile.gettempdir(), f"{PREFIX}.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Lab:
    """`nodes` namespaces with addresses 10.S.T.1, .2, ...; the bridge, where NATS is, has .254."""

    def __init__(self, nodes: int, *, relayed: frozenset[int] = frozenset()) -> None:
        """Build it; `relayed` nodes are behind a TAP relay, so that they can be delayed."""
        self.nodes = nodes
        self.name = PREFIX + _base36(os.getpid())
        self._relays: dict[int, tuple[subprocess.Popen[str], Path]] = {}
        self._shaped: set[int] = set()
        self._classes: dict[tuple[int, int], int] = {}
        self._losses = False
        try:
            with _building():  # Or two labs would take the same subnet.
                sweep()
                taken = sh("ip", "-br", "addr")
                number = next(n for n in range(1, 255) if f"10.77.{n}." not in taken)
                self.subnet = ipaddress.ip_network(f"10.77.{number}.0/24")
                self.gateway = str(self.subnet[254])
                self.addresses = tuple(str(self.subnet[node + 1]) for node in range(nodes))
                self._build(relayed)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def space(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self.name}-{node}"

    def port(self, node: int) -> str:
        """Return the name of the bridge's port towards a node."""
        return f"{self.name}v{node}"

    def placement(self) -> dict[str, object]:
        """Return what `perdure run --placement FILE` wants to know."""
        return {
            "bind": self.gateway,
            "addresses": list(self.addresses),
            "command": ["ip", "netns", "exec", f"{self.name}-{{node}}"],
            "interface": "eth0",
            "network_faults": True,
        }

    def write_placement(self, folder: Path) -> Path:
        """Write that file; return its path."""
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.placement()))
        return path

    def _build(self, relayed: frozenset[int]) -> None:
        bridge = f"{self.name}b"
        sh("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0")
        sh("ip", "addr", "add", f"{self.gateway}/24", "dev", bridge)
        sh("ip", "link", "set", bridge, "up")
        for node in range(self.nodes):
            space, port = self.space(node), self.port(node)
            sh("ip", "netns", "add", space)
            if node in relayed:
                self._start_relay(node)
            else:
                sh(
                    "ip",
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    space,
                )
            sh("ip", "link", "set", port, "master", bridge, "up")
            sh("ip", "-n", space, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            sh("ip", "-n", space, "link", "set", "eth0", "up")
            sh("ip", "-n", space, "link", "set", "lo", "up")

    def _start_relay(self, node: int) -> None:
        control = Path(f"/tmp/{self.name}-{node}.relay")
        control.write_text("0 0 0")
        script = Path(__file__).parent / "relay.py"
        relay = subprocess.Popen(
            [sys.executable, script, self.space(node), self.port(node), control],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relays[node] = (relay, control)
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != "up":
            raise LabError(f"the relay of node {node} did not start")

    # --- faults -------------------------------------------------------------------------------

    def slow_link(self, source: int, destination: int, mbit: float) -> None:
        """Limit what `source` sends to `destination` to `mbit` Mbit/s."""
        handle = self._make_class(source, destination, f"{mbit}mbit")
        port = self.port(destination)
        sh("tc", "qdisc", "replace", "dev", port, "parent", handle, "pfifo", "limit", 1000)

    def drop_link(self, source: int, destination: int) -> None:
        """Lose everything that `source` sends to `destination`, without a word."""
        handle = self._make_class(source, destination, _UNLIMITED)
        sh("tc", "qdisc", "replace", "dev", self.port(destination), "parent", handle, "blackhole")

    def lose(self, source: int, destination: int, percent: float) -> None:
        """Lose a share of what `source` sends to `destination`, at random."""
        if not self._losses:
            hook = "{ type filter hook forward priority 0; }"
            sh("nft", f"add table bridge {self.name}")
            sh("nft", f"add chain bridge {self.name} forward {hook}")
            self._losses = True
        match = f"ip saddr {self.addresses[source]} ip daddr {self.addresses[destination]}"
        rule = f"{match} numgen random mod 1000 < {min(999, round(percent * 10))} drop"
        sh("nft", f"add rule bridge {self.name} forward {rule}")

    def slow_nic(self, node: int, mbit: float) -> None:
        """Limit a node's interface to `mbit` Mbit/s, each way."""
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
        sh("tc", "-n", self.space(node), "qdisc", "replace", "dev", "eth0", *shape)
        sh("tc", "qdisc", "replace", "dev", self.port(node), *shape)

    def delay(self, node: int, delay_ms: float, jitter_ms: float = 0.0) -> None:
        """Delay everything to and from a relayed node, each way."""
        _, control = self._relays[node]
        control.write_text(f"{delay_ms / 1000} {jitter_ms / 1000} 0")

    def cut(self, node: int) -> None:
        """Take a node's interface down, as a pulled cable does."""
        sh("ip", "link", "set", self.port(node), "down")

    def heal(self) -> None:
        """Undo every fault."""
        for node in self._shaped:
            sh("tc", "qdisc", "del", "dev", self.port(node), "root", check=False)
        self._shaped.clear()
        self._classes.clear()
        if self._losses:
            sh("nft", "delete", "table", "bridge", self.name, check=False)
            self._losses = False
        for node in range(self.nodes):
            sh("tc", "-n", self.space(node), "qdisc", "del", "dev", "eth0", "root", check=False)
            sh("tc", "qdisc", "del", "dev", self.port(node), "root", check=False)
            sh("ip", "link", "set", self.port(node), "up")
        for _, control in self._relays.values():
            control.write_text("0 0 0")

    def _make_class(self, source: int, destination: int, rate: str) -> str:
        """Return the handle of the class that carries the link, at `rate`."""
        port = self.port(destination)
        if destination not in self._shaped:
            sh("tc", "qdisc", "replace", "dev", port, "root", "handle", "1:", "htb", "default", 1)
            sh("tc", "class", "replace", "dev", port, "parent", "1:", "classid", "1:1",
               "htb", "rate", _UNLIMITED, "quantum", 60000)  # fmt: skip
            self._shaped.add(destination)
        handle = f"1:{source + 10:x}"
        sh("tc", "class", "replace", "dev", port, "parent", "1:", "classid", handle,
           "htb", "rate", rate, "quantum", 60000)  # fmt: skip
        if (source, destination) not in self._classes:
            self._classes[(source, destination)] = source
            match = ("match", "ip", "src", f"{self.addresses[source]}/32")
            sh("tc", "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", "prio", 1,
               "u32", *match, "flowid", handle)  # fmt: skip
        return handle

    def close(self) -> None:
        """Remove everything, processes inside included."""
        for relay, control in self._relays.values():
            relay.kill()
            relay.wait()
            if relay.stdout is not None:
                relay.stdout.close()
            control.unlink(missing_ok=True)
        self._relays.clear()
        _remove(self.name)


@contextlib.contextmanager
def healed(lab: Lab) -> Iterator[Lab]:
    """Undo the faults that were made in the block."""
    try:
        yield lab
    finally:
        lab.heal()
