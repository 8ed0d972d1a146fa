"""Saving and restoring one rank: snapshot on the training thread, everything else beside it.

A failed save never harms training: the previous checkpoint stays `latest`, and the failure is an
event. A rank that dies in between leaves a temporary directory, which the next generation removes.
Training waits `WAIT_S` at most for a disk that hangs. Later saves are skipped until the disk
answers. A rank then declines the saves that it has skipped, because other ranks may wait for it.

One save of one rank, in its background thread, goes from the snapshot to the tag (`SaveTask`).
Ranks meet in files of the checkpoint's temporary directory: `plan-R` what rank R holds, `part-R`
that its share is on the disk, read back and found equal (or why not). Rank 0 gathers the parts,
publishes, tags. Whatever a rank waits for is bounded, and ends when another rank has failed.

A rank whose disk is full cannot leave a file for the others. It marks the save as failed in the
generation's store (`worker.steering.cells`), which needs no disk. A rank that exits marks itself
there.
"""

import contextlib
import errno
import functools
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from perdure.failpoints import failpoint
from perdure.files import replace_file, sync_path
from perdure.files.owner import refuse_owner
from perdure.files.regular import open_file
from perdure.model.checkpoints import (
    OWNER,
    TEMPORARY,
    FileEntry,
    Manifest,
    Part,
    name_checkpoint,
    parse_checkpoint_name,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError, UnfitError
from perdure.model.events import AnyEvent, CheckpointFailed, CheckpointRestored, CheckpointSaved
from perdure.model.job import CheckpointConfig
from perdure.worker.busy import Busy, compute_allowance_s, declare_busy
from perdure.worker.checkpoint.files import (
    Remote,
    apply_retention,
    claim_place,
    describe_file,
    drop_cached,
    find_problem,
    list_checkpoints,
    open_place,
    publish,
    read_manifest,
    read_saved,
    remove_temporaries,
    tag_latest,
)
from perdure.worker.checkpoint.index import INDEX, read_index
from perdure.worker.checkpoint.loaders import count_loaders, resume_loaders, watch_loaders
from perdure.worker.checkpoint.loading import check_archive
from perdure.worker.checkpoint.plain import check_plain, read_plain_state
from perdure.worker.checkpoint.registry import Registry, list_hooked, name_misfit
from perdure.worker.checkpoint.script import ScriptState
from perdure.worker.checkpoint.sharded import (
    SavePlanCache,
    in_group,
    read_tensors,
    write_index,
    write_tensors,
)
from perdure.worker.checkpoint.staging import Staging
from perdure.worker.rng import capture_rng, compare_fingerprints, restore_rng, take_fingerprint
from perdure.worker.settings import OWN
from perdure.worker.steering.cells import Away, Cells
from perdure.worker.steering.executor import REPEATED, SaveSkipped
from perdure.worker.system.stderr import say

T = TypeVar("T")
TIMEOUT_S = 300.0
"""Seconds that a save waits for the shares of all other ranks, together."""
WAIT_S = 30.0
"""Seconds that a save waits for the one before: a disk may be slow for a while."""
_QUICK_S = 1.0
"""Seconds that a wait for a disk may take before it is declared as a busy phase."""
_AGAIN_S = 1.0
"""Seconds between two tries to read a disk that does not answer."""
_UNREAD = "its disk does not answer: "
"""What is wrong with a checkpoint that may be whole."""
_LAST = ("stop", "end")
"""Reasons of saves after which no step is made."""
_POLL_S = 0.01
_LOOKS = 2
"""Steps before which perdure looks at the script: the first one, and the one after it."""
_ASK_S = 0.5
"""Seconds between two questions to the store while a save waits for a rank."""
_SKIPPED_MAX = 100
"""Newest skipped saves that a rank declines; no rank waits for older ones."""
_DECLINED = "it was still writing an earlier checkpoint"
_FREE_MIN = 64 << 10
_ROOM = 1 << 20
"""Bytes that a checkpoint takes beside its tensors."""
_PLAN, _PART, _RESULTS = "plan-{}.bin", "part-{}.json", "results-{}.bin"
"""Files of one rank in a checkpoint's temporary directory."""


_MOUNT = "mount the disk of [checkpoint] url again, and run the same command"


class SaveAbandoned(Exception):
    """Raised where another rank has failed, which says so itself."""


class PeerLate(PlatformError):
    """Raised where a rank that lives did not do its share."""


class SaveTask:
    """One rank's part in one checkpoint."""

    def __init__(
        self,
        *,
        root: Path,
        remote: Remote | None,
        step: int,
        attempt: str,
        rank: int,
        world_size: int,
        reason: str,
        allow_pickle: bool,
        marks: "SaveMarks | None" = None,
    ) -> None:
        """Write the checkpoint of `step` under `root`; nothing is touched yet.

        `attempt` is the same on all ranks and never used twice.
        """
        self._marks, self._attempt = marks, attempt
        self._root, self._remote = root, remote
        self.folder = root / f"{name_checkpoint(step)}.{attempt}{TEMPORARY}"
        self._failed = root / f"{name_checkpoint(step)}.{attempt}.failed{TEMPORARY}"
        self.step, self.reason = step, reason
        self.began = time.monotonic()
        self.doing = f"it waits for {root}"
        """What it waits for, in words."""
        self.awaited = -1
        """The rank whose share it waits for; -1 for none."""
        self._rank, self._world_size = rank, world_size
        self._allow_pickle = allow_pickle
        self._begun = False
        self.is_agreed = False
        """All ranks have begun it."""

    def write(
        self,
        staging: Staging,
        cache: SavePlanCache,
        tensors: dict[str, Tensor],
        own: dict[str, Any],
    ) -> Manifest | None:
        """Carry it out; return what was published, on rank 0.

        Raises:
            SaveAbandoned: another rank has failed.
            Exception: whatever prevents it here.
        """
        staging.copy.make()
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(OSError):
                os.nice(10)  # This thread's: training goes first. More would starve beside it.
        if self.reason in _LAST:
            self._wait_for_room(sum(one.nbytes for one in tensors.values()))
        self.folder.mkdir(parents=True, exist_ok=True)
        # Another user may have made it, with links in it. Some mounts refuse such a probe.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.folder) as probe:
            if os.fstat(probe.fileno()).st_uid != self.folder.lstat().st_uid:
                raise PlatformError(f"{self.folder} belongs to another user")
        self._begun = True
        self._agree(cache, tensors)
        self.is_agreed = True
        self._write_share(staging, cache, tensors, own)
        return self._finish(cache, own) if self._rank == 0 else None

    def _wait_for_room(self, needed: int) -> None:
        """Wait a while for `needed` bytes on the disk: no later save can follow this one."""
        deadline_s, told = time.monotonic() + WAIT_S, False
        with contextlib.suppress(OSError):  # Writing meets the same error.
            self._root.mkdir(parents=True, exist_ok=True)
            while shutil.disk_usage(self._root).free < needed + _ROOM:
                if time.monotonic() > deadline_s:
                    return
                if not told and self._rank == 0:
                    told = True
                    say(f"{self._root} is full: the last checkpoint waits {WAIT_S:.0f} s for room")
                time.sleep(_AGAIN_S)

    def fail(self, text: str) -> bool:
        """Clean up, and leave word for the others; return whether this rank must report it."""
        if self._rank == 0:
            self._mark_failed()
            self._leave_word()
            return True
        if self._abandoned:
            return False
        with contextlib.suppress(OSError):  # First, so that there is room for the word.
            own = f"__{self._rank}_*", f"rank-{self._rank}.pt", f"plan-{self._rank}.new"
            for path in [path for name in own for path in self.folder.glob(name)]:
                path.unlink()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(
                self.folder / _PART.format(self._rank),
                encode(Part(self._rank, (), text)),
                synced=True,
            )
        except OSError:
            self._mark_failed()
            return True
        return False

    def _mark_failed(self) -> None:
        if self._marks is not None and self._world_size > 1:
            self._marks.mark_failed(self._attempt)

    def _leave_word(self) -> None:
        """Rename rank 0's directory: a rank that comes later must not wait for a plan in it."""
        if self._world_size > 1:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.rename(self._failed)
            shutil.rmtree(self._failed, ignore_errors=True)  # It follows no link.
            with contextlib.suppress(OSError):
                self._failed.mkdir()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _abandoned(self) -> bool:
        """Whether rank 0 has given this checkpoint up."""
        with contextlib.suppress(OSError):  # The disk answers with errors: nothing is known.
            return self._failed.exists() or (self._begun and not self.folder.exists())
        return False

    def name_wait(self) -> str:
        """Name it for a verdict, with the rank that it waits for."""
        return "checkpoint" if self.awaited < 0 else f"checkpoint, waits for rank {self.awaited}"

    def explain(self, error: BaseException) -> str:
        """Return one line that names the place."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._root).free < _FREE_MIN:
                return f"No space left on the device of {self._root}"
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename or self._root}"
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__

    def _agree(self, cache: SavePlanCache, tensors: dict[str, Tensor]) -> None:
        mine = cache.describe(tensors)
        if self._world_size == 1:
            cache.agree([mine])
            return
        path = self.folder / _PLAN.format(self._rank)
        path.with_suffix(".new").write_bytes(mine)
        path.with_suffix(".new").rename(path)
        cache.agree([path.read_bytes() for path in self._wait_for_all(_PLAN)])

    def _write_share(
        self,
        staging: Staging,
        cache: SavePlanCache,
        tensors: dict[str, Tensor],
        own: dict[str, Any],
    ) -> None:
        """Write this rank's files, read them back, and report them."""
        failpoint("checkpoint/begin")
        results, hashes = write_tensors(self.folder, cache, tensors, staging.give_way)
        name = f"rank-{self._rank}.pt"
        with open(self.folder / name, "wb") as file:  # Not a path: torch would keep the GIL.
            torch.save(own, file)
        sync_path(self.folder / name)
        try:
            torch.load(self.folder / name, weights_only=not self._allow_pickle, map_location="cpu")
        except pickle.UnpicklingError:
            _name_pickle(own)
            raise
        (self.folder / _RESULTS.format(self._rank)).write_bytes(results)
        failpoint("checkpoint/written")
        files = []
        for path in [name, *sorted(hashes)]:
            drop_cached(self.folder / path)
            entry = describe_file(self.folder, path, staging.give_way)
            if entry.xxh3_128 != hashes.get(path, entry.xxh3_128):
                raise PlatformError(f"{path} is not on the disk what was written")
            files.append(entry)
        sync_path(self.folder)
        failpoint("checkpoint/hashed")
        self.doing = "its copy is compared with the state at the next optimizer step"
        staging.copy.confirm()
        self.doing = f"it waits for {self._root}"
        part = encode(Part(self._rank, tuple(files)))
        replace_file(self.folder / _PART.format(self._rank), part, synced=True)
        sync_path(self.folder)
        failpoint("checkpoint/reported")

    def _finish(self, cache: SavePlanCache, own: dict[str, Any]) -> Manifest:
        """Gather all parts, publish, check, tag."""
        ranks = range(self._world_size)
        files: list[FileEntry] = []
        for path in self._wait_for_all(_PART):
            files.extend(self._read_part(path).files)
        assert cache.metadata is not None
        results = [(self.folder / _RESULTS.format(rank)).read_bytes() for rank in ranks]
        write_index(self.folder, cache.metadata, results)
        read_index(self.folder)  # It raises where it cannot be read.
        files.append(describe_file(self.folder, INDEX))
        failpoint("checkpoint/gathered")
        for name in [name.format(r) for name in (_PLAN, _PART, _RESULTS) for r in ranks]:
            (self.folder / name).unlink(missing_ok=True)
        manifest = Manifest(
            step=self.step,
            world_size=self._world_size,
            files=tuple(files),
            fingerprint=own["fingerprint"],
            metrics=dict(own["extra"].get("metrics", {})),
            reason=self.reason,
            job=_read_job(),
        )
        final = publish(self.folder, self._root, self.step, manifest)
        if self._remote:
            self.doing = f"it waits for {self._remote.show(final)}"
            self._remote.upload(final, manifest)
        tag_latest(self._root, final)
        failpoint("checkpoint/tagged")
        remove_temporaries(self._root, self.step)  # Of attempts that failed: all are past them.
        return manifest

    def _wait_for_all(self, name: str) -> list[Path]:
        """Return the file `name` of each rank, as soon as all are there.

        Raises:
            SaveAbandoned: another rank has failed, and reports it.
            PlatformError: another rank has failed, has exited, or is late.
        """
        deadline_s, before = time.monotonic() + TIMEOUT_S, self.doing
        paths = [self.folder / name.format(rank) for rank in range(self._world_size)]
        for rank, path in enumerate(paths):
            self._wait(path, rank, deadline_s)
        self.doing, self.awaited = before, -1
        return paths

    def _wait(self, path: Path, rank: int, deadline_s: float) -> None:
        ask_s = time.monotonic() + _ASK_S
        while not path.exists():
            self.awaited = rank
            self.doing = f"it waits for the share of rank {rank} in {self._root}"
            if self._rank != 0 and self._abandoned:
                raise SaveAbandoned
            part = self.folder / _PART.format(rank)
            if part.exists():
                self._read_part(part)
            now = time.monotonic()
            if now > deadline_s:
                raise PeerLate(
                    f"rank {rank} did not finish its share in {TIMEOUT_S:.0f} s",
                    hint=f"do all nodes see {self._root}? [checkpoint] url",
                )
            if self._marks is not None and now > ask_s:
                ask_s = now + _ASK_S
                if self._marks.is_failed(self._attempt):
                    raise SaveAbandoned
                if self._marks.has_exited(rank) and not path.exists():
                    raise PlatformError(f"rank {rank} has exited before it finished its share")
            time.sleep(_POLL_S)

    def _read_part(self, path: Path) -> Part:
        part: Part = decode(path.read_bytes(), Part)
        if part.error and self._rank != 0:
            raise SaveAbandoned
        if part.error:
            kind = PeerLate if part.error == _DECLINED else PlatformError
            raise kind(f"rank {part.rank}: {part.error}")
        return part


class SaveMarks:
    """Which saves have failed, and which ranks have exited: cells that need no disk.

    If the cells cannot be reached, nothing is known, and a save ends by its time limit.
    """

    def __init__(self, open_cells: Callable[[], Cells | None], world: str) -> None:
        """Use the cells of `open_cells()`; `world` tells ranks from those of other worlds."""
        self._open_cells, self._world = open_cells, world
        self._cells = open_cells()

    def mark_failed(self, attempt: str) -> None:
        """Tell all ranks that there will be no checkpoint of `attempt`."""
        self._mark(self._cells, f"save/{attempt}")

    def mark_exited(self, rank: int) -> None:
        """Tell all ranks that `rank` writes no more. Another thread may use the cells."""
        self._mark(self._open_cells(), f"exited/{self._world}/{rank}")

    def is_failed(self, attempt: str) -> bool:
        """Return whether a rank has marked `attempt` as failed."""
        return self._is_marked(f"save/{attempt}")

    def has_exited(self, rank: int) -> bool:
        """Return whether `rank` has exited."""
        return self._is_marked(f"exited/{self._world}/{rank}")

    def _mark(self, cells: Cells | None, name: str) -> None:
        with contextlib.suppress(Away, OSError, RuntimeError):  # No thread starts at the very end.
            if cells is not None:
                cells.open()
                cells.settle(name, "drop")

    def _is_marked(self, name: str) -> bool:
        with contextlib.suppress(Away, OSError):
            if self._cells is not None:
                self._cells.open()
                return self._cells.read(name) == "drop"
        return False


def _reading() -> Busy:
    """Return a context in which a disk that hangs makes no verdict on the rank that reads it."""
    return declare_busy("restore", at_most_s=compute_allowance_s(0.0) + _QUICK_S)


class _Found(NamedTuple):
    """The newest usable checkpoint."""

    step: int
    """0 where there is none."""
    folder: Path | None
    skipped: list[str]
    """Newer ones, each with the reason why it cannot be used."""
    own: dict[str, Any]
    """What this rank has kept of its own."""


def _read_job() -> str:
    """Return the name of the job that this rank is of; empty outside of one."""
    return os.environ.get("PERDURE_JOB", "")


def _fitting(folder: Path) -> contextlib.AbstractContextManager[None]:
    return name_misfit(
        f"{folder.name} does not fit the script",
        hint="run the script as it was, or give this one a new job name or checkpoint url",
    )


def _name_pickle(own: dict[str, Any]) -> None:
    """Find the object whose state is no plain data any more.

    Raises:
        UnfitError: it is this one.
    """
    for states in (own["objects"], own["models"], own["optimizers"]):
        for name, state in states.items():
            check_plain(name, state)


class Checkpointer:
    """Checkpoints of one rank in one generation."""

    def __init__(
        self,
        *,
        url: str,
        config: CheckpointConfig,
        rank: int,
        world_size: int,
        generation: int,
        emit: Callable[[AnyEvent], object],
        now: Callable[[], float],
        world: str = "",
        registry: Registry | None = None,
        open_cells: Callable[[], Cells | None] = lambda: None,
    ) -> None:
        """Save under `url`, a directory or an fsspec URL; nothing is touched yet.

        `world` tells this object's attempts from those of others of the same generation;
        `registry` is for states of another kind than models and optimizers. `open_cells` connects
        to the store of the world, by which ranks hear of each other's failed saves.
        """
        self._marks = SaveMarks(open_cells, f"g{generation}{world}")
        self._root, self._remote = open_place(url)
        self._url, self._config = url, config
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._emit, self._now, self._world = emit, now, world
        watch_loaders()
        self._registry = registry or Registry(rank, world_size)
        self._staging = Staging()
        self._cache = SavePlanCache(rank)
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._writing: SaveTask | None = None
        """What the writing thread is at."""
        self._skipped: deque[SaveTask] = deque(maxlen=_SKIPPED_MAX)
        """Saves that were not begun meanwhile, which that thread declines at its end."""
        self._num_skipped = 0
        """Saves that were not begun since the last one was written."""
        self._surplus_told = False
        self._told = False
        """The disk was said to hang, and nothing was written since."""
        self.unbegun = -1
        """Newest step of which a save came to nothing before all ranks had begun it. All ranks
        know of it: none begins before all have said what they hold."""
        self._written, self._longest_s = 0, 0.0
        """Step of the newest checkpoint, 0 for none; seconds that the slowest save took."""
        self._attempts = 0
        self._found: _Found | None = None
        self._kept: tuple[Path, dict[str, Any], CheckpointRestored] | None = None
        """What was restored, if nobody has registered some of it. It goes with the first step: an
        object that is registered later would get a state of long ago. What is left is said then."""
        self._stepped = False
        self._looks = 0
        self._handles: list[Any] = []
        """Hooks of the second step, which see whether gradients are kept from step to step."""
        self._script = ScriptState()
        self._restored: CheckpointRestored | None = None
        self._doubts: list[str] = []
        """Why no resume can be exact, as far as it is known before any step."""
        self.gate_s = 0.0
        """Seconds waited at gates so far."""

    def register(self, name: str, value: Any) -> None:
        """Save and restore `value` under `name`; an optimizer's step becomes a gate.

        What was restored before and nobody has taken is its state, until a step was made.

        Raises:
            UnfitError: what is kept does not fit.
        """
        kept = self._kept
        awaited = kept is not None and name in self._registry.list_left(kept[1])
        self._registry.add(name, value)
        if kept is not None and awaited:
            self._take(name, *kept)
        if isinstance(value, torch.optim.Optimizer):
            for one in list_hooked(value):
                one.register_step_pre_hook(lambda *_: self._pass_gate(id(value)))
                one.register_step_post_hook(lambda *_: self._staging.leave_update())

    def _pass_gate(self, optimizer: int) -> None:
        self._registry.updated.add(optimizer)
        self.gate_s += self._staging.enter_update()

    def begin_step(self) -> None:
        """Note that a step begins: gradients of optimizers that step in it are not saved."""
        for handle in self._handles:
            handle.remove()
        self._handles = self._registry.watch_gradients() if self._looks == _LOOKS - 1 else []
        self._registry.updated.clear()
        if self._looks < _LOOKS:
            self._looks += 1
            self._look_at_script()
        if self._stepped:
            self._drop_kept()
        self._stepped = True

    def _look_at_script(self) -> None:
        """Say what the script changes and no checkpoint has."""
        if not self._looks or self._restored is None:
            return
        if why := self._script.look(*self._registry.list_kept()):
            self._tell_restored(structs.replace(self._restored, why_not_exact=why))

    def _drop_kept(self) -> None:
        """Say what the checkpoint has and no object took."""
        if self._kept is not None:
            (_, own, restored), self._kept = self._kept, None
            left = [name for name in self._registry.list_left(own) if not name.startswith(OWN)]
            if left:
                why = f"in the checkpoint and not registered: {', '.join(left)}"
                self._tell_restored(structs.replace(restored, why_not_exact=why))

    def _tell_restored(self, event: CheckpointRestored) -> None:
        if event.why_not_exact and self._rank == 0:
            say(f"not exact from step {event.step} on: {event.why_not_exact}")
        self._emit(event)

    def settle(self) -> None:
        """Wait until what was begun is copied: the state may change, by whatever means."""
        self._staging.copy.wait()

    def enter_replay(self) -> None:
        """Gate before a graph is replayed that has captured an optimizer's step."""
        self._registry.updated.update(map(id, self._registry.optimizers.values()))
        self.gate_s += self._staging.enter_replay()

    def close(self) -> None:
        """Wait until what was begun is written, has failed, or has hung for too long."""
        self._staging.copy.wait()
        task = self._wait_for_writer(last=True)
        if task is None:
            # A thread that came back from native code later would abort the interpreter.
            if self._writer is not None:
                self._writer.join()
            return
        newest = f"the newest one is of step {self._written}" if self._written else "there is none"
        text = f"{self._describe(task)}; training has ended, and {newest}"
        if self._rank == 0:
            self._tell_failed(task, text, writing=task.step)

    def leave(self) -> None:
        """Tell the others, at the end of this process, that this rank writes no more."""
        if self._world_size > 1:
            self._marks.mark_exited(self._rank)

    def _wait_for_writer(self, *, last: bool) -> SaveTask | None:
        """Wait for what is being written; return it if it takes too long.

        The `last` one is worth as long a wait as an evaluation would get. No other wait is longer
        than `WAIT_S`, and a disk that is known to hang is not waited for.
        """
        with self._changed:
            task = self._writing
        if task is None:
            return None
        most_s = WAIT_S if not self._told else 0.0
        if last:
            age_s = time.monotonic() - task.began
            most_s = compute_allowance_s(self._longest_s) - age_s
        if self._is_idle(min(most_s, _QUICK_S)):
            return None
        if most_s <= _QUICK_S:
            return task
        with declare_busy(task.name_wait(), at_most_s=most_s + _QUICK_S):
            if self._is_idle(min(most_s, WAIT_S)):
                return None
            if most_s > WAIT_S and self._rank == 0:
                say(f"{self._describe(task)}; perdure waits {most_s:.0f} s for it at most")
            return None if self._is_idle(most_s - WAIT_S) else task

    def _is_idle(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._writing is None, max(0.0, wait_s))

    def _describe(self, task: SaveTask) -> str:
        age_s = time.monotonic() - task.began
        return (
            f"the last checkpoint, of step {task.step}, is still being written "
            f"since {age_s:.0f} s: {task.doing}"
        )

    def _skip(self, task: SaveTask, writing: SaveTask) -> bool:
        """Leave `task` to the writing thread, to be declined; False if that thread has ended."""
        with self._changed:
            if self._writing is not writing:
                return False
            if self._world_size > 1:
                self._skipped.append(task)
            self._num_skipped += 1
            self.unbegun = max(self.unbegun, task.step)
            return True

    # --- saving ------------------------------------------------------------------------------

    def save(self, step: int, *, reason: str, extra: dict[str, Any]) -> float:
        """Take a snapshot of `step` and begin to write it; return the seconds it stalled.

        A save that is still being written is waited for first, a while. All ranks call it at the
        same step.

        Raises:
            SaveSkipped: the one before is still being written.
        """
        began = time.monotonic()
        self._look_at_script()
        self._attempts += 1
        task = SaveTask(
            root=self._root,
            remote=self._remote,
            step=step,
            attempt=f"g{self._generation}{self._world}.{self._attempts}",
            rank=self._rank,
            world_size=self._world_size,
            reason=reason,
            allow_pickle=self._config.allow_pickle,
            marks=self._marks,
        )
        self._staging.copy.wait()
        writing = self._wait_for_writer(last=reason in _LAST)
        if writing is not None and self._skip(task, writing):
            again, self._told = self._told, True
            raise SaveSkipped(self._describe(writing), writing=writing.step, again=again)
        task.began = time.monotonic()
        try:
            own = self._staging.copy_own(
                {
                    "rng": capture_rng(),
                    "extra": extra,
                    "loaders": count_loaders(),
                    "fingerprint": take_fingerprint(self._world_size),
                    **self._registry.own(),
                }
            )
            live = self._registry.tensors()
            tensors = self._staging.begin(live, self._registry.gated(live))
        except Exception as error:  # The script's own state_dict() among others.
            self._start(task, functools.partial(self._fail, task, error))
            return time.monotonic() - began
        stall_s = time.monotonic() - began
        self._start(task, functools.partial(self._write, task, tensors, own, stall_s))
        return stall_s

    def _start(self, task: SaveTask, write: Callable[[], object]) -> None:
        """Call `write` in a thread of its own: any touch of a disk may take for ever."""

        def run() -> None:
            skipped: SaveTask | None = task
            try:
                write()
            finally:
                if not task.is_agreed:
                    self.unbegun = max(self.unbegun, task.step)
                while skipped is not None:
                    with self._changed:
                        skipped = self._skipped.popleft() if self._skipped else None
                        if skipped is None:
                            self._writing = None
                            self._changed.notify_all()
                    if skipped is not None:
                        with contextlib.suppress(OSError):
                            skipped.fail(_DECLINED)

        self._writing = task
        self._writer = threading.Thread(target=run, name="perdure-checkpoint", daemon=True)
        self._writer.start()

    def _write(
        self, task: SaveTask, tensors: dict[str, Tensor], own: dict[str, Any], stall_s: float
    ) -> None:
        gate_s, step = self.gate_s, task.step
        try:
            manifest = task.write(self._staging, self._cache, tensors, own)
            save_s = time.monotonic() - task.began
            told, self._told = self._told, False
            if not told:
                self._longest_s = max(self._longest_s, save_s)
            if manifest is None:
                return
            if told:
                say(f"checkpoints are written again: that of step {step} took {save_s:.0f} s")
            self._written = step
            final = self._root / name_checkpoint(step)
            self._emit(
                CheckpointSaved(
                    generation=self._generation,
                    step=step,
                    path=self._remote.show(final) if self._remote else str(final),
                    bytes=sum(entry.bytes for entry in manifest.files),
                    stall_s=stall_s + self.gate_s - gate_s,
                    save_s=save_s,
                    at_s=self._now(),
                    reason=task.reason,
                    skipped=self._take_num_skipped(),
                )
            )
            task.doing = "it is written, and the removal of older ones has not ended"
            failpoint("checkpoint/surplus")
            self._remove_surplus(step)
        except SaveAbandoned:
            task.fail("another rank failed")
        except BaseException as error:
            self._fail(task, error)

    def _remove_surplus(self, step: int) -> None:
        """Remove what no rule keeps. If a disk refuses, say so once: `step` is saved."""
        try:
            left = apply_retention(self._root, self._config, step)
            if self._remote:
                self._remote.apply_retention(self._config, step)
            why = f"{left[0]} is still there" if left else ""
        except Exception as error:  # Libraries of remote places have errors of their own.
            why = str(error) or repr(error)
        if why and not self._surplus_told:
            say(f"old checkpoints cannot be removed: {why}")
        self._surplus_told = bool(why)

    def _take_num_skipped(self) -> int:
        with self._changed:
            skipped, self._num_skipped = self._num_skipped, 0
            return skipped

    def _fail(self, task: SaveTask, error: BaseException) -> None:
        """Say that this save came to nothing; the previous one stays what it was.

        A rank that does not write its share is told of once, as is a disk that hangs.
        """
        text = task.explain(error)
        if not task.fail(text):
            return
        if isinstance(error, PeerLate):
            again, self._told = self._told, True
            if again and task.reason in REPEATED:
                return
        self._tell_failed(task, text)

    def _tell_failed(self, task: SaveTask, error: str, *, writing: int = -1) -> None:
        say(f"checkpoint of step {task.step} failed: {error}")
        self._emit(
            CheckpointFailed(
                generation=self._generation,
                step=task.step,
                error=error,
                at_s=self._now(),
                writing=writing,
            )
        )

    def check(self) -> None:
        """Refuse objects that could not be saved, before any work is done.

        Raises:
            UnfitError: the state of an object is no plain data.
        """
        if not self._config.allow_pickle:
            self._registry.check()
        self._doubts = self._registry.try_twins()

    # --- restoring ---------------------------------------------------------------------------

    def read_newest(self) -> tuple[int, dict[str, Any]]:
        """Return what `restore` will load: its step (0 for none) and the states of its objects.

        Objects are all but models and optimizers. All ranks take the same checkpoint: rank 0
        chooses where a process group is up, otherwise each comes to the same choice. One that
        cannot be used is skipped with a line that says why.

        Raises:
            UnfitError: it holds pickles, and `checkpoint.allow_pickle` is off.
            PlatformError: what is there cannot be listed.
        """
        found = self._found = self._found or self._read()
        return found.step, found.own.get("objects", {})

    def restore(self, extra: dict[str, Any]) -> int:
        """Load what `read_newest` returns into what was registered; return its step, or 0.

        Fills `extra` with what was saved beside it.

        Raises:
            UnfitError: the checkpoint is whole but does not fit what was registered.
        """
        step, folder, skipped, own = self._found or self._read()
        self._found, self._written = None, step
        why: list[str] = []
        if folder is not None:
            failpoint("checkpoint/restore")
            with _fitting(folder), _reading():
                why = self._load(folder, own, extra)
        restored = CheckpointRestored(
            generation=self._generation,
            rank=self._rank,
            step=step,
            path=str(folder) if folder is not None else "",
            skipped=tuple(skipped),
            why_not_exact="; ".join(dict.fromkeys([*self._doubts, *why])),
        )
        self._restored = restored
        self._tell_restored(restored)
        if folder is not None and self._registry.list_left(own):
            self._kept = folder, own, restored
        return step

    def _read(self) -> _Found:
        with _reading():
            root, remote = self._root, self._remote
            names = self._list_names(root, remote)
            self._claim()
            if not names and (other := self._config.from_):
                root, remote = open_place(other)
                names = self._list_names(root, remote)
                if not names:
                    raise UnfitError(
                        f"checkpoint.from: {other} has no checkpoint",
                        hint="name a folder of step-*",
                    )
            return self._choose(root, remote, names)

    def _claim(self) -> None:
        """Refuse another job's checkpoints; remove what this job has left half written.

        Raises:
            UnfitError: they are another's.
        """
        job, owner = _read_job(), ""
        if self._rank == 0 and job:
            with contextlib.suppress(Exception):  # Remote places have errors of their own.
                owner = claim_place(self._root, self._remote, job)
        refuse_owner(self._url, self._agree_on(owner), job)
        if self._rank == 0:
            remove_temporaries(self._root)

    def _choose(self, root: Path, remote: Remote | None, names: list[str]) -> _Found:
        group = in_group()
        skipped: list[str] = []
        unread = False
        for name in names:
            problem = self._check(root, remote, name, group)
            if not problem:
                folder = root / name
                return _Found(int(name.rsplit("-", 1)[1]), folder, skipped, self._read_own(folder))
            unread = unread or problem.startswith(_UNREAD)
            skipped.append(f"{root / name}: {problem}")
            if self._rank == 0:
                say(f"checkpoint skipped: {skipped[-1]}")
        if unread:  # They may all be whole.
            raise PlatformError(f"no checkpoint can be read; {skipped[-1]}", hint=_MOUNT)
        return _Found(0, None, skipped, {})

    def _agree_on(self, value: Any) -> Any:
        if not in_group():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _list_names(self, root: Path, remote: Remote | None) -> list[str]:
        """Return the names of all checkpoints, newest first; where ranks form a group, rank 0's.

        Raises:
            UnfitError: somebody has removed them; their folder is still there.
            PlatformError: their disk did not answer for as long as perdure waits.
        """

        def look() -> list[str]:
            names = {path.name for _, path in list_checkpoints(root)}
            if remote:
                names |= set(remote.list_names())
            saved = "" if names else read_saved(root)
            if saved and (root / OWNER).exists():
                raise UnfitError(
                    f"perdure saved {saved} in {root}, and somebody has removed it",
                    hint="put it back, or begin at step 0 after `perdure rm JOB`",
                )
            if saved:
                why = f"perdure saved {saved} there, and nothing is there now"
                raise OSError(errno.ENOENT, why, str(root))
            return sorted(names, key=lambda name: parse_checkpoint_name(name) or 0, reverse=True)

        try:
            mine = self._rank == 0 or not in_group()
            names = self._read_patiently(look, compute_allowance_s(0.0)) if mine else []
        except OSError as error:
            why = f"{error.strerror or error}: {error.filename or root}"
            raise PlatformError(f"no checkpoint can be read: {why}", hint=_MOUNT) from error
        agreed: list[str] = self._agree_on(names)
        return agreed

    def _read_patiently(self, read: Callable[[], T], most_s: float) -> T:
        """Return what `read` returns, tried again for `most_s` seconds while a disk is away.

        Raises:
            OSError: the disk is still away.
        """
        deadline_s, told = time.monotonic() + most_s, False
        while True:
            try:
                return read()
            except OSError as error:
                if time.monotonic() >= deadline_s:
                    raise
                if not told:
                    told = True
                    why = f"{error.strerror or error}: {error.filename or self._root}"
                    say(f"checkpoints cannot be read: {why}; perdure waits {most_s:.0f} s")
            time.sleep(_AGAIN_S)

    def _check(self, root: Path, remote: Remote | None, name: str, group: bool) -> str:
        """Return what is wrong with a checkpoint; the ranks of a group share the reading."""
        problem = ""
        if remote and (self._rank == 0 or not group):
            problem = remote.fetch(root, name)
        problem = self._agree_on(problem)
        if not problem:
            problem = self._find_problem(root / name, group)
        if not group:
            return problem
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return next((text for text in problems if text), "")

    def _find_problem(self, folder: Path, group: bool) -> str:
        share = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)

        def look() -> str:
            return find_problem(folder, read_manifest(folder), *share)

        try:
            return self._read_patiently(look, WAIT_S)
        except ProtocolError as error:
            return error.message
        except OSError as error:
            return f"{_UNREAD}{error.strerror or error}"

    def _read_own(self, folder: Path) -> dict[str, Any]:
        plain = not self._config.allow_pickle
        found: list[dict[str, Any]] = []
        for path in self._registry.list_own(folder):
            try:
                with open_file(path, follow=True) as file:
                    check_archive(file)
                    found.append(torch.load(file, map_location="cpu", weights_only=plain))
            except pickle.UnpicklingError as error:
                raise UnfitError(
                    f"{path.name} needs pickle", hint="set checkpoint.allow_pickle"
                ) from error
        return self._registry.merge([read_plain_state(one) for one in found])

    def _take(
        self, name: str, folder: Path, own: dict[str, Any], restored: CheckpointRestored
    ) -> None:
        """Load what the checkpoint has of the object that was registered just now."""
        with _fitting(folder), torch.no_grad():
            read_tensors(folder, self._registry.targets(own, name))
            self._registry.load_own(own, name)
        if why := getattr(self._registry.others.get(name), "why_not_exact", ""):
            self._tell_restored(structs.replace(restored, why_not_exact=why))
        if not self._registry.list_left(own):
            self._kept = None

    def _load(self, folder: Path, own: dict[str, Any], extra: dict[str, Any]) -> list[str]:
        """Load one checkpoint; return why the resume is not exact, empty where it is."""
        why = self._registry.replay(own)
        with torch.no_grad():
            read_tensors(folder, self._registry.targets(own))
            why += self._registry.load_own(own)
        extra.update(own["extra"])
        differs = compare_fingerprints(own["fingerprint"], take_fingerprint(self._world_size))
        restore_rng(own["rng"])
        resume_loaders(own.get("loaders", 0))
        return [*why, differs] if differs else why
