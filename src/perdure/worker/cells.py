"""Where the ranks of a generation settle an agreement if perdure's control plane is away.

Each agreement has one cell, and the first write to it holds for all ranks. A rank that hears a
commit writes `commit`. A rank that has heard nothing for long writes `drop`. So all ranks apply,
or all ranks drop, whichever of them the decision has reached. The cells are keys of the
generation's TCPStore, which lives on node 0 and needs neither bus, agent, nor controller.
"""

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Literal, Protocol

Fate = Literal["", "commit", "drop"]
_TIMEOUT_S = 5.0
_AWAY_S = 60.0
"""Seconds until a store that did not answer is asked again. The control thread waits for it."""
_PREFIX = "perdure/agreed/"
_FATES: dict[bytes, Fate] = {b"": "", b"commit": "commit"}
"""Content of a cell -> fate. torch's store has no login: whatever else a stranger has written there
counts as `drop`, for all ranks alike."""


class Cells(Protocol):
    """One cell for each agreement."""

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Write `fate`, unless the cell has one; return which it has, empty if no store answers."""

    def read(self, id_: str) -> Fate:
        """Return the fate of an agreement; empty for none so far."""


class OwnCells:
    """The cells of a rank that is alone."""

    def __init__(self) -> None:
        """Begin with empty cells."""
        self._fates: dict[str, Fate] = {}

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Write `fate`, unless the cell has one; return which it has."""
        return self._fates.setdefault(id_, fate)

    def read(self, id_: str) -> Fate:
        """Return the fate of an agreement; empty for none so far."""
        return self._fates.get(id_, "")


class NoCells:
    """Stands for cells if ranks have no store in common: no rank can drop anything."""

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Return the empty fate: no other rank can read this one's."""
        return ""

    def read(self, id_: str) -> Fate:
        """Return the empty fate."""
        return ""


class StoreCells:
    """Keys of the TCPStore at `host`:`port`. A store that does not answer is asked again."""

    def __init__(self, host: str, port: int) -> None:
        """Connect at the first use."""
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._store: Any = None
        self._again_s = 0.0

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Write `fate`, unless the cell has one; return which it has."""
        self._again_s = 0.0  # The other ranks have to read it.
        return self._ask(lambda store: store.compare_set(_PREFIX + id_, "", fate))

    def read(self, id_: str) -> Fate:
        """Return the fate of an agreement; empty for none so far."""
        key = _PREFIX + id_
        return self._ask(lambda store: store.get(key) if store.check([key]) else b"")

    def _ask(self, question: Any) -> Fate:
        with self._lock:
            if time.monotonic() < self._again_s:
                return ""
            try:
                self._store = self._store or self._connect()
                found = bytes(question(self._store))
            except (OSError, RuntimeError):  # It ends with node 0, or with its generation.
                self._store, self._again_s = None, time.monotonic() + _AWAY_S
                return ""
            return _FATES.get(found, "drop")

    def _connect(self) -> Any:
        import torch.distributed

        # TCPStore itself would go on trying for its whole time-out.
        socket.create_connection((self._host, self._port), timeout=_TIMEOUT_S).close()
        make: Any = vars(torch.distributed)["TCPStore"]
        timeout = timedelta(seconds=_TIMEOUT_S)
        return make(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout
        )


def open_cells(*, grows: bool = False) -> Cells:
    """Return the cells of this rank's generation: perdure serves its store, or rank 0 does.

    A rank that is alone needs no store, unless its world `grows`.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if (port := os.environ.get("MASTER_PORT", "")).isdigit() and (grows or not alone):
        return StoreCells(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(port))
    return OwnCells() if alone else NoCells()
