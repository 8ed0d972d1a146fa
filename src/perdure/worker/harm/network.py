"""Network faults from inside a node of the laboratory, at its own interface.

Only where `perdure run --placement` said that every node has a network namespace of its own:
anywhere else these commands would change the machine's own network, and are refused.
"""

import json
import os
import subprocess
from typing import Any

_COMMAND_S = 10
_UNLIMITED = "40gbit"


class NetworkFaults:
    """The node's interface; `objection` says why it may not be touched."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        """Read where this is from the environment."""
        text = (os.environ if environ is None else environ).get("PERDURE_LAB", "")
        lab = json.loads(text) if text else {}
        self._interface = str(lab.get("interface", ""))
        self._addresses = tuple(lab.get("addresses", ()))

    def find_objection(self, args: dict[str, Any]) -> str:
        """Return why such a fault cannot be; empty where it can."""
        if not self._interface:
            return "network faults need nodes with networks of their own: see docs/lab.md"
        if not -1 <= int(args.get("to", -1)) < len(self._addresses):
            return f"there is no node {args['to']}"
        return ""

    def strike(self, kind: str, args: dict[str, Any]) -> None:
        """Carry it out.

        Raises:
            OSError, subprocess.SubprocessError: `ip` or `tc` is missing or failed.
        """
        if kind == "link-down":
            self._run("ip", "link", "set", self._interface, "down")
            return
        self._tc("qdisc", "replace", "root", "handle", "1:", "htb", "default", "10")
        to = int(args.get("to", -1))
        rate = f"{float(args.get('mbit', 100.0)):g}mbit" if kind == "slow-link" else _UNLIMITED
        handle = "1:10"
        if to >= 0:
            handle = "1:20"
            self._tc("class", "replace", *_class("1:10", _UNLIMITED))
            match = ("u32", "match", "ip", "dst", f"{self._addresses[to]}/32", "flowid", handle)
            self._tc("filter", "replace", "parent", "1:", "protocol", "ip", "prio", "1", *match)
        self._tc("class", "replace", *_class(handle, rate))
        queue = ("pfifo", "limit", "1000") if kind == "slow-link" else ("blackhole",)
        self._tc("qdisc", "replace", "parent", handle, *queue)

    def heal(self) -> None:
        """Undo all of them, whoever made them."""
        if self._interface:
            self._run("ip", "link", "set", self._interface, "up")
            self._tc("qdisc", "del", "root", check=False)

    def _tc(self, what: str, verb: str, *words: str, check: bool = True) -> None:
        self._run("tc", what, verb, "dev", self._interface, *words, check=check)

    def _run(self, *words: str, check: bool = True) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
        if check and done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _class(handle: str, rate: str) -> tuple[str, ...]:
    return ("parent", "1:", "classid", handle, "htb", "rate", rate, "quantum", "60000")
