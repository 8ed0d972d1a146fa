"""How a rank ended: what its keeper writes down before anybody hears of it."""

import msgspec


class ExitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a rank ended; the keeper writes it to a file before anybody hears of it."""

    rank: int
    generation: int
    pid: int
    at_s: float
    code: int = 0
    """Exit code; 0 with `signal` set."""
    signal: int = 0
    oom: bool = False
    """The kernel's out-of-memory killer did it (cgroup `memory.events`)."""
    asked: bool = False
    """perdure itself ended it."""
    error: str = ""
    """Last line of the exception, such as `ValueError: bad lr`."""
    traceback: str = ""
    last_output: tuple[str, ...] = ()
    """Last lines of its standard error, or of its output where that is empty."""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by exit code 0."""
        return bool(self.code or self.signal)

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because another rank's connection went away."""
        text = f"{self.error} {self.traceback[-2000:]} {' '.join(self.last_output[-3:])}"
        return self.failed and names_lost_peer(text)

    @property
    def cause(self) -> str:
        """Return it in words, such as `signal 9 (SIGKILL)`."""
        if self.oom:
            return "OOM kill (signal 9, by the kernel for want of memory)"
        if self.signal:
            return f"signal {self.signal} ({_SIGNALS.get(self.signal, '?')})"
        return f"exit code {self.code}" + (f": {self.error}" if self.error else "")


_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""What gloo and NCCL say when the other end of a connection is gone."""


def names_lost_peer(text: str) -> bool:
    """Return whether `text`, of an error, says that the other end of a connection is gone."""
    return any(words in text for words in _PEER_GONE)


_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
    15: "SIGTERM", 19: "SIGSTOP", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip
