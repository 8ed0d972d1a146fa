"""A rank for `test_forking`: threads use perdure's locks all the time while it forks.

It prints a line once every child has ended. A child that inherits a held lock never ends.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from perdure.worker import busy, control
from perdure.worker.attach import attach_rank
from perdure.worker.busy import declare_busy
from perdure.worker.data import Prefetcher
from perdure.worker.ring import RingWriter
from perdure.worker.start import imports
from perdure.worker.system.process import die_with

FORKS, LOADERS = 5, 2


class Samples(torch.utils.data.Dataset[Any]):
    """A dataset whose samples use what perdure offers to a script."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with declare_busy("sample", at_most_s=60):
            return index


def end_with_parent() -> None:
    """A test that is killed leaves no rank behind: its end of the pipe is closed then.

    `sys.stdin` would be held by this thread, and a child of multiprocessing closes it.
    """
    os.read(0, 1)
    os._exit(3)


def repeat(act: Callable[[], object]) -> None:
    def run() -> None:
        while True:
            act()

    threading.Thread(target=run, daemon=True).start()


@contextlib.contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Have another thread hold `locks`."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    yield
    over.set()
    holder.join()


def be_busy() -> None:
    with declare_busy("phase", at_most_s=60):
        pass


def fork() -> None:
    """Wait for a child that ends as a script does, also a phase of its parent."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(parent)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def main() -> None:
    folder = Path(sys.argv[1])
    ring = folder / "ring"
    RingWriter.create(str(ring), rank=0, generation=0).close()
    os.environ |= {"PERDURE_RING": str(ring), "PERDURE_SOCKET": str(folder / "nobody")}
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    control.RETRY_S = 0.0
    imports._LOOK_S = (0.0, 0.0)
    attachment = attach_rank()
    assert attachment is not None
    gc.freeze()  # Otherwise each child looks at all of torch when it ends.
    line: Any = attachment.control
    with declare_busy("held", at_most_s=60), held(busy._lock, line._changed, line._stop._cond):
        fork()
    imports.record_imports(str(folder / "imports"), str(folder))
    repeat(be_busy)
    repeat(lambda: attachment.drain(0.0))
    for _ in range(FORKS):
        with declare_busy("fork", at_most_s=60):
            fork()
    for _ in range(LOADERS):
        assert len(list(DataLoader(Samples(), num_workers=2))) == len(Samples())
        prefetcher = Prefetcher(lambda step, micro_batch: Samples()[micro_batch], 2)
        assert [prefetcher.load(0, at) for at in range(8)] == list(range(8))
        prefetcher.close()
    print("every child has ended", flush=True)
    os._exit(0)


main()
