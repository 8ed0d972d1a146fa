"""Where the ranks of a world settle an agreement if perdure's control plane is away.

Each agreement has one cell, and the first write to it holds for all ranks. `commit` is written by
ranks that have heard it. `drop` is written once all ranks have voted for it: each has waited for
long and has heard nothing. The cells are keys of the TCPStore at which the world meets, which needs
neither bus, agent, nor controller. `worker.steering.boundary` asks them in a thread of their own.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal

Fate = Literal["", "commit", "drop"]
TIMEOUT_S = 5.0
_PREFIX = "perdure/agreed/"
_FATES: dict[bytes, Fate] = {b"": "", b"commit": "commit"}
"""Content of a cell -> fate. torch's store has no login: whatever else a stranger has written there
counts as `drop`, for all ranks alike."""


class Away(Exception):
    """Raised if the cells cannot be reached."""


class Cells:
    """One cell for each agreement, and one for the question of ranks that wait.

    These are in the process of a rank that is alone. Others raise `Away` if no answer comes.
    """

    def __init__(self) -> None:
        """Begin with empty cells."""
        self._fates: dict[str, Fate] = {}
        self._votes: dict[str, set[int]] = {}
        self._asked = ""

    def open(self) -> str:
        """Go to the cells of the world of now; return where they are."""
        return "here"

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Write `fate`, unless the cell has one; return which it has."""
        return self._fates.setdefault(id_, fate)

    def read(self, id_: str) -> Fate:
        """Return the fate of an agreement; empty for none so far."""
        return self._fates.get(id_, "")

    def vote(self, id_: str, rank: int, voters: Iterable[int]) -> bool:
        """Let `rank` vote for a drop; return whether all `voters` have."""
        votes = self._votes.setdefault(id_, set())
        votes.add(rank)
        return votes.issuperset(voters)

    def ask(self, id_: str) -> None:
        """Ask the other ranks for their votes, and for what they have heard."""
        self._asked = id_

    def asked(self) -> str:
        """Return the agreement that a rank has asked about last; empty for none."""
        return self._asked


class StoreCells(Cells):
    """Keys of the TCPStore at the address `locate()`. One thread may use them."""

    def __init__(self, locate: Callable[[], str]) -> None:
        """Connect at the first use, and again if the address changes or the store fails."""
        self._locate = locate
        self._address = ""
        self._store: Any = None
        self._left: Future[Any] | None = None
        """What this store has not answered in time."""

    def open(self) -> str:
        """Connect to the store of the world of now; return its address."""
        address = self._locate()
        if address != self._address:
            self._address, self._store, self._left = address, None, None
        if self._store is None:
            self._store = self._do(lambda _: _connect(address))
        return address

    def settle(self, id_: str, fate: Fate) -> Fate:
        """Write `fate`, unless the cell has one; return which it has."""
        return _read_fate(self._do(lambda store: store.compare_set(_PREFIX + id_, "", fate)))

    def read(self, id_: str) -> Fate:
        """Return the fate of an agreement; empty for none so far."""
        return _read_fate(self._read(_PREFIX + id_))

    def vote(self, id_: str, rank: int, voters: Iterable[int]) -> bool:
        """Let `rank` vote for a drop; return whether all `voters` have."""
        self._do(lambda store: store.set(f"{_PREFIX}{id_}/{rank}", "drop"))
        keys = [f"{_PREFIX}{id_}/{voter}" for voter in voters]
        return bool(self._do(lambda store: store.check(keys)))

    def ask(self, id_: str) -> None:
        """Ask the other ranks for their votes, and for what they have heard."""
        self._do(lambda store: store.set(_PREFIX, id_))

    def asked(self) -> str:
        """Return the agreement that a rank has asked about last; empty for none."""
        return self._read(_PREFIX).decode(errors="replace")

    def _read(self, key: str) -> bytes:
        found: bytes = self._do(lambda store: store.get(key) if store.check([key]) else b"")
        return found

    def _do(self, act: Callable[[Any], Any]) -> Any:
        """Return what `act` returns. torch waits without a limit for a host that has stopped."""
        if self._left is not None and not self._left.done():
            raise Away("the store has stopped")
        store, made = self._store, Future[Any]()

        def run() -> None:
            try:
                made.set_result(act(store))
            except Exception as error:  # It ends with its host, or with its world.
                made.set_exception(Away(str(error)))

        threading.Thread(target=run, name="perdure-store", daemon=True).start()
        self._left = made
        if not wait([made], TIMEOUT_S).done:
            self._store = None
            raise Away("the store does not answer")
        if made.exception() is not None:
            self._store = None
        return made.result()


def _read_fate(found: bytes) -> Fate:
    return _FATES.get(bytes(found), "drop")


def _connect(address: str) -> Any:
    import torch.distributed

    host, _, port = address.rpartition(":")
    # TCPStore itself would go on trying for its whole time-out.
    socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    make: Any = vars(torch.distributed)["TCPStore"]
    timeout = timedelta(seconds=TIMEOUT_S)
    return make(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def open_cells() -> Cells | None:
    """Return the cells of a generation whose ranks stay; None if the ranks have no store."""
    env = os.environ
    if env.get("WORLD_SIZE", "1") == "1":
        return Cells()
    address = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{env.get('MASTER_PORT', '')}"
    return StoreCells(lambda: address) if env.get("MASTER_PORT", "").isdigit() else None
