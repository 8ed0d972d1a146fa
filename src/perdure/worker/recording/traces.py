"""Flight Recorder's whole trace of this rank, written down when somebody is suspected.

The recorder polls only a status; what every collective of the last minutes was, with sizes and
stacks, is in Flight Recorder and dies with the process that a restart ends. So each living rank
writes it, by a thread of its own: first without stacks, which takes milliseconds, then once more
with them (symbols are looked up the first time, up to two seconds, mostly without the GIL). Both
are whole files at any moment. PyTorch's own analyzer reads them:

    torchfrtrace JOB_DIRECTORY/traces/gN/gloo

gloo leaves out which ranks a group has, without which the analyzer refuses; that is filled in.
Deliberately not done by a signal's handler: a rank that is stopped, or that holds the GIL in
native code, writes nothing, and its file is missing. Its peers' tell what they wait for.
"""

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any

from perdure.model.orders import TakeStacks
from perdure.worker.recording.recorder import Dump
from perdure.worker.stderr import say

BYTES_MAX = 32 << 20
"""Of one file; one that would be larger with stacks is left without."""
GENERATIONS_KEPT = 4
"""Of this rank's traces, those of the newest generations."""

Groups = Callable[[], Mapping[str, tuple[str, tuple[int, ...]]]]
"""Name of each process group -> its description and global ranks."""


class TraceWriter:
    """Writes `DIRECTORY/BACKEND/rank_R`, one order at a time; those that come meanwhile are lost.

    They are repeats: the controller asks until the stacks have come.
    """

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        directory: str,
        dumps: Mapping[str, Dump],
        groups: Groups,
    ) -> None:
        """Write what `dumps` (by backend) say, with `groups` filled in where they are missing."""
        self._rank, self._generation = rank, generation
        self._directory, self._dumps, self._groups = directory, dumps, groups
        self._busy = threading.Lock()

    def handle(self, order: TakeStacks) -> None:
        """Begin to write, in a thread, if the order is for this generation."""
        if order.generation == self._generation and self._dumps and self._busy.acquire(False):
            threading.Thread(target=self._run, name="perdure-traces", daemon=True).start()

    def _run(self) -> None:
        try:
            self.write()
        except Exception as error:
            say(f"no Flight Recorder trace: {error!r}")
        finally:
            self._busy.release()

    def write(self) -> None:
        """Write every backend's trace; none of a backend that recorded nothing.

        Raises:
            OSError: there is no room, or no permission.
        """
        for stacks in (False, True):
            for backend, dump in self._dumps.items():
                trace = pickle.loads(dump(True, stacks))
                if trace.get("entries"):
                    self._put(backend, trace)
        self._forget_old()

    def _put(self, backend: str, trace: dict[str, Any]) -> None:
        known = trace.setdefault("pg_config", {})
        for name, (description, ranks) in self._groups().items():
            known.setdefault(name, {"name": name, "desc": description, "ranks": str(list(ranks))})
        data = pickle.dumps(trace)
        if len(data) > BYTES_MAX:
            return
        directory = os.path.join(self._directory, backend)
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"rank_{self._rank}")
        # Outside the directory that the analyzer walks through.
        temporary = os.path.join(self._directory, f".{backend}-{self._rank}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _forget_old(self) -> None:
        """Remove this rank's traces of generations long past."""
        base = os.path.dirname(self._directory)
        for name in os.listdir(base):
            number = name[1:]
            if number.isdigit() and int(number) <= self._generation - GENERATIONS_KEPT:
                for backend in self._dumps:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(base, name, backend, f"rank_{self._rank}"))
                        os.rmdir(os.path.join(base, name, backend))  # By its last rank.
                        os.rmdir(os.path.join(base, name))
