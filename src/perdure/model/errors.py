"""The tree of errors; the class says whose fault it was.

    PerdureError                exit code
    ├── ConfigError             2   the user: an option, a job file, a script that is not there
    │   ├── MeasureError        2   a cost profile lacks a measure that is needed
    │   └── UnfitError          2   a checkpoint does not fit the script, or cannot keep its state
    ├── PlatformError           3   the outside: a full disk, a port in use, a tool that is missing
    │   ├── RequestError        3   nobody answered on the bus: ask again
    │   ├── DifferError         3   members of an elastic world differ, and this one may be right
    │   └── DeviceLostError     5   device-lost: no call of this process's GPU works, or ends, again
    ├── ProtocolError           3   a peer: a message out of order or malformed
    │   └── FencedError         3   another controller writes the journal: leave
    └── SafetyError             4   refused: the request would lose something

A bug of perdure's own is an assertion, never one of these.
"""


class PerdureError(Exception):
    """An error to show as one line, with one line `hint:` below it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Keep `message` (what, naming the place) and `hint` (what to do) apart."""
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PerdureError):
    """The user asked for something that cannot be."""

    exit_code = 2


class MeasureError(ConfigError):
    """A cost was never measured: nothing is planned with a guess in its place."""


class UnfitError(ConfigError):
    """A checkpoint does not fit the script or the job, so that no restart is tried."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Have a traceback show the hint below the message."""
        super().__init__(message, hint=hint)
        if hint:
            self.add_note(f"hint: {hint}")


class PlatformError(PerdureError):
    """The machine, a disk, a network or a foreign tool failed."""

    exit_code = 3


class DifferError(PlatformError):
    """Members of an elastic world differ, and this one is not known to be wrong."""


class ProtocolError(PerdureError):
    """A peer said something that it may not say now."""

    exit_code = 3


class RequestError(PlatformError):
    """A request was not answered in time, or nobody serves its subject now. Ask again."""


class DeviceLostError(PlatformError):
    """The device is lost to this process, which has to end: another one can take its place."""

    exit_code = leaves_at_once = 5
    """The process ends with it and without clearing up, which may wait for the device for ever."""


class FencedError(ProtocolError):
    """Another writer has appended to the journal: this one must leave, and decide nothing more."""


class SafetyError(PerdureError):
    """Refused, because something would be lost."""

    exit_code = 4
