"""The script's own checkpoints on this node: checked before a start, and the last one copied."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

from perdure.adapters.file_thread import FileThread
from perdure.files.own import (
    OwnCheckpoint,
    choose_place,
    copy_whole,
    find_newest,
    find_root,
    list_declared,
    locate_copy,
    put_back,
    set_aside,
)
from perdure.model.events import AnyEvent, OwnChecked, TornFound
from perdure.model.job import JobSpec
from perdure.model.orders import CheckOwn
from perdure.service.agent.outbox import Outbox

log = logging.getLogger("perdure.agent")

CHECK_S = 5.0
"""A check that takes longer finds nothing."""
_SECOND_LOOK_S = 0.5
_COPY_S = 0.25


class OwnCheckpoints:
    """Answers `CheckOwn`, one generation after another."""

    def __init__(
        self, spec: JobSpec, node: int, outbox: Outbox, *, now: Callable[[], float]
    ) -> None:
        """Look at what `spec` declares; tell `outbox`."""
        self._spec, self._node, self._outbox, self._now = spec, node, outbox, now
        self._generation = -1
        """The newest whose check has begun."""
        self._files = FileThread()

    def is_new(self, order: CheckOwn) -> bool:
        """Return whether an order was never taken: it is repeated until the answer has arrived."""
        new = order.generation > self._generation
        self._generation = max(self._generation, order.generation)
        return new

    async def check(self, order: CheckOwn) -> None:
        """Check all patterns, move what is torn, and answer."""
        moved: list[str] = []
        newest: OwnCheckpoint | None = None
        for pattern in self._spec.checkpoint.own:
            try:
                async with asyncio.timeout(CHECK_S):
                    torn, whole = await self._files.call(find_newest, pattern, self._spec.cwd)
            except Exception as error:  # A check that fails finds nothing; the start goes on.
                log.warning("the checkpoints %s are not checked: %r", pattern, error)
                self._files = FileThread()  # The old one may never return.
                continue
            newest = max(filter(None, (newest, whole)), key=_age, default=None)
            for one in torn:
                moved += await self._move(order, pattern, one, whole)
        step, path = (newest.step, self._shorten(newest.path)) if newest else (-1, "")
        self._put(
            OwnChecked(
                node=self._node, generation=order.generation, at_s=self._now(),
                moved=tuple(moved), newest=path, step=step,
            )
        )  # fmt: skip

    async def _move(
        self, order: CheckOwn, pattern: str, torn: OwnCheckpoint, whole: OwnCheckpoint | None
    ) -> list[str]:
        """Move one torn checkpoint once the journal has it; return what to say."""
        root = find_root(pattern, self._spec.cwd)
        target, path = choose_place(torn.path, root, self._spec.cwd), self._shorten(torn.path)
        known = asyncio.Event()
        self._outbox.put(
            TornFound(
                node=self._node, generation=order.generation, path=path, why=torn.why,
                to=self._shorten(target), at_s=self._now(),
            ),
            known.set,
        )  # fmt: skip
        await known.wait()
        await asyncio.sleep(_SECOND_LOOK_S)
        text = f"{path} ({torn.why})"
        try:
            async with asyncio.timeout(CHECK_S):
                again, _ = await self._files.call(find_newest, pattern, self._spec.cwd)
                if torn.path not in [one.path for one in again]:
                    return []  # Another node sees the same folder, and was faster.
                if torn.mark not in [one.mark for one in again]:
                    return [f"{text}; another program is writing it, so that it stays there"]
            if (age := await self._put_back(torn.path, root, target)) is None:
                async with asyncio.timeout(CHECK_S):
                    await self._files.call(
                        set_aside, torn.path, target, whole.path if whole else ""
                    )
        except FileNotFoundError:
            return []
        except (OSError, TimeoutError) as error:
            return [f"{text}; it cannot be moved: {error}"]
        text = f"{text}; moved to {self._shorten(target)}"
        if age is not None:
            return [f"{text}; its copy, {age} old, takes its place"]
        if whole is None:
            return [f"{text}; nothing older that is whole exists"]
        age = _render_age(whole.written_s)
        return [f"{text}; the newest whole one is {self._shorten(whole.path)}, {age} old"]

    async def _put_back(self, path: str, root: str, target: str) -> str | None:
        """Have the copy take the place of an overwritten file; return its age, if it does."""
        if not self._spec.checkpoint.own_copy:
            return None
        copy = locate_copy(path, root, self._spec.cwd)
        try:
            async with asyncio.timeout(10 * CHECK_S):
                if await self._files.call(put_back, copy, path, target):
                    return _render_age(os.stat(path).st_mtime)
        except (OSError, TimeoutError) as error:
            log.warning("no copy of %s: %s", path, error)
        return None

    def _shorten(self, path: str) -> str:
        """Return a path from the job's folder, if it is below."""
        short = os.path.relpath(path, self._spec.cwd)
        return path if short.startswith("../..") else short

    def _put(self, event: AnyEvent) -> None:
        log.info("%.300s", event)
        self._outbox.put(event)

    async def keep_copies(self) -> None:
        """Copy each declared file after every whole save."""
        files = FileThread()  # A copy takes long; a check does not wait for it.
        while True:
            await asyncio.sleep(_COPY_S)
            for pattern in self._spec.checkpoint.own:
                try:
                    await files.call(self._copy, pattern)
                except Exception as error:  # The disk is full, or the file has gone.
                    log.warning("no copy of %s: %r", pattern, error)

    def _copy(self, pattern: str) -> None:
        root = find_root(pattern, self._spec.cwd)
        for path in list_declared(pattern, self._spec.cwd)[:1]:
            if os.path.isfile(path):
                copy_whole(path, locate_copy(path, root, self._spec.cwd))


def _age(checkpoint: OwnCheckpoint) -> float:
    return checkpoint.written_s


def _render_age(written_s: float) -> str:
    age_s = max(0.0, time.time() - written_s)
    return f"{age_s:.0f} s" if age_s < 600 else f"{age_s / 60:.0f} min"
