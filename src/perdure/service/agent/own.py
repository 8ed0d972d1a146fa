"""The script's own checkpoints on this node: checked before a start, and the last one copied."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

from perdure.adapters.file_thread import FileThread
from perdure.adapters.own_away import OwnAway
from perdure.files.own import (
    OwnCheckpoint,
    choose_place,
    clear_rooms,
    copy_whole,
    examine,
    find_newest,
    find_root,
    list_declared,
    locate_copy,
    put_back,
    read_sizes,
    set_aside,
)
from perdure.files.pointers import find_stand_in, list_naming
from perdure.files.regular import UnfitFileError
from perdure.model.events import AnyEvent, OwnChecked, TornFound
from perdure.model.job import JobSpec
from perdure.model.orders import FETCH_S, CheckOwn
from perdure.service.agent.outbox import Outbox

log = logging.getLogger("perdure.agent")

CHECK_S = 5.0
"""A check that takes longer finds nothing."""
_SECOND_LOOK_S = 0.5
_PUT_BACK_S = 50.0
"""A copy that takes longer does not take the place of a torn file; of `own_copy`, `FETCH_S`."""
_LATE_S = 1.0
"""Seconds in which a thread sees by itself that it is late: afterwards it changes nothing."""
_COPY_S = 0.25
_AWAY_S, _AWAY_AGAIN_S = 1.0, 30.0
"""Seconds between two looks for a new checkpoint, and after a copy that failed."""
_LAST_S = 8.0
"""Seconds for the last copy at the job's end."""


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
        own = spec.checkpoint.own if spec.checkpoint.url and spec.unordered.mends else ()
        self._away = [OwnAway(spec.checkpoint.url, spec.name, pattern, spec.cwd) for pattern in own]
        """Where copies go, by pattern; a job that is only observed fetches and makes none."""
        self._copied: dict[str, object] = {}
        """Pattern -> sizes, times, and pointers of the newest checkpoint, which is copied."""
        self._away_files = FileThread()
        """One copy after another; a copy that hangs delays nothing else."""
        self._leads = False
        """Rank 0 was here."""

    def is_new(self, order: CheckOwn) -> bool:
        """Return whether an order was never taken: it is repeated until the answer has arrived."""
        new = order.generation > self._generation
        self._generation = max(self._generation, order.generation)
        return new

    async def check(self, order: CheckOwn) -> None:
        """Check all patterns, move what is torn, and answer."""
        moved, fetched = list[str](), list[str]()
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
            for one in torn if order.move else ():
                moved += await self._move(order, pattern, one, whole)
        for place in list(self._away):
            newest = await self._fetch(place, fetched) or newest
        step, path = (newest.step, self._shorten(newest.path)) if newest else (-1, "")
        self._put(
            OwnChecked(
                node=self._node, generation=order.generation, at_s=self._now(),
                moved=tuple(moved), fetched=tuple(fetched), newest=path, step=step,
            )
        )  # fmt: skip
        await self._clear()

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
            if not (instead := await self._put_back(torn.path, root, target, whole)):
                until_s = time.monotonic() + CHECK_S
                async with asyncio.timeout(CHECK_S + _LATE_S):
                    await self._files.call(
                        set_aside, torn.path, target, whole.path if whole else "", until_s
                    )
        except FileNotFoundError:
            return []
        except Exception as error:  # A start waits for the answer.
            if isinstance(error, TimeoutError):
                self._files = FileThread()  # The old one may never return.
            return [f"{text}; it cannot be moved: {str(error) or 'the disk does not answer'}"]
        text = f"{text}; moved to {self._shorten(target)}"
        if instead:
            return [f"{text}; {instead} takes its place"]
        if whole is None:
            return [f"{text}; nothing older that is whole exists"]
        age = _render_age(whole.written_s)
        return [f"{text}; the newest whole one is {self._shorten(whole.path)}, {age} old"]

    async def _put_back(
        self, path: str, root: str, target: str, whole: OwnCheckpoint | None
    ) -> str:
        """Have a copy take the place of an overwritten file; return what does, if one does.

        Raises:
            OSError: there is a copy, and no room for it. Without the torn file, the script could
                begin from step 0, and its first save would overwrite the copy.
        """
        copies: dict[str, str] = {}
        limit_s = FETCH_S if self._spec.checkpoint.own_copy else _PUT_BACK_S
        if self._spec.checkpoint.own_copy:
            copies[locate_copy(path, root, self._spec.cwd)] = "its copy"
        if whole is not None and (twin := find_stand_in(whole.path, path)):
            copies[twin] = f"a copy of {self._shorten(twin)}"
        for copy, what in copies.items():
            try:
                async with asyncio.timeout(limit_s + _LATE_S):
                    until_s = time.monotonic() + limit_s
                    if await self._files.call(put_back, copy, path, target, until_s):
                        return f"{what}, {_render_age(os.stat(path).st_mtime)} old,"
            except (FileNotFoundError, UnfitFileError) as error:
                log.warning("no copy of %s: %s", path, error)
            except OSError as error:
                why = error.strerror or "the disk takes too long"
                raise type(error)(f"{self._shorten(copy)} cannot take its place: {why}") from error
        return ""

    def _shorten(self, path: str) -> str:
        """Return a path from the job's folder, if it is below."""
        short = os.path.relpath(path, self._spec.cwd)
        return path if short.startswith("../..") else short

    # --- copies under checkpoint.url ------------------------------------------------------------

    async def keep_away(self, leads: Callable[[], bool]) -> None:
        """Copy each newest whole checkpoint under `checkpoint.url`, while rank 0 is here."""
        pause_s = _AWAY_S
        while True:
            await asyncio.sleep(pause_s)
            if leads():
                self._leads = True
                pause_s = _AWAY_S if await self._copy_away() else _AWAY_AGAIN_S

    async def finish(self) -> None:
        """Copy the last ones, as far as that is soon done."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                if self._leads:
                    await self._copy_away()

    async def _copy_away(self) -> bool:
        done = True
        for place in list(self._away):
            try:
                await self._away_files.call(self._upload, place)
            except Exception as error:  # The storage is away, or the script removed it.
                log.warning("no copy of %s under checkpoint.url: %r", place.pattern, error)
                done = False
        return done

    def _upload(self, place: OwnAway) -> None:
        """Copy the newest whole checkpoint; what is copied is not read again every second."""
        paths = list_declared(place.pattern, self._spec.cwd)[:1]
        sizes = read_sizes(paths[0]) if paths else {}
        seen = (sizes, list_naming(paths[0])) if sizes else None
        if not paths or (seen and self._copied.get(place.pattern) == seen):
            return
        whole = find_newest(place.pattern, self._spec.cwd)[1]
        if whole is not None and place.upload(whole):
            log.info("%s is copied to %s", whole.path, place.url)
        if whole is not None and whole.path == paths[0]:
            self._copied[place.pattern] = seen

    async def _fetch(self, place: OwnAway, said: list[str]) -> OwnCheckpoint | None:
        """Bring the newest copy if this machine has no checkpoint of the pattern, and say so."""
        try:
            async with asyncio.timeout(CHECK_S):
                if await self._files.call(list_declared, place.pattern, self._spec.cwd):
                    return None
            async with asyncio.timeout(FETCH_S):
                path = await FileThread().call(place.fetch, FETCH_S)
        except Exception as error:  # The script begins as it would without a copy.
            why = str(error) or f"it took more than {FETCH_S:g} s"
            said.append(f"none is fetched from {place.url}: {why}; the script begins without one")
            self._away.remove(place)  # The copy there is newer than all that follow.
            return None
        if not path:
            return None
        found = examine(path, exact=True)
        age = _render_age(found.written_s)
        said.append(f"{self._shorten(path)}, {age} old, is fetched from {place.url}")
        return found

    def _put(self, event: AnyEvent) -> None:
        log.info("%.300s", event)
        self._outbox.put(event)

    async def _clear(self) -> None:
        """Remove what an earlier agent has left in the midst of a copy."""
        files = FileThread()
        for pattern in self._spec.checkpoint.own:
            with contextlib.suppress(OSError):
                await files.call(clear_rooms, pattern, self._spec.cwd)

    async def keep_copies(self) -> None:
        """Copy each declared file after every whole save."""
        await self._clear()
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
