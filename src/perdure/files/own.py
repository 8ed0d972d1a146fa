"""A script's own checkpoints: which format each has, and whether it is whole or torn.

Recognised: files of `torch.save` (Lightning's too), safetensors, folders of Hugging Face's Trainer,
accelerate, torch.distributed.checkpoint and DeepSpeed. A check reads headers, directories and
indices, and no tensor. Torn means that a load must fail. An error, or a format that is not
recognised, means `unknown`; nothing is ever moved for it.

Without torch: agents and the command line import it, and a rank whose load has failed.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import glob
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from perdure.files import sync_path
from perdure.files.pointers import (
    DEEPSPEED,
    find_ahead,
    find_twin,
    is_pointer,
    lead,
    list_broken,
    list_naming,
    list_numbers,
    list_sets,
)
from perdure.files.regular import open_file, read_file
from perdure.files.tensorfiles import INDICES, read_safetensors

TORN = ".torn"
"""End of the name of the folder that torn checkpoints are moved to."""
COPY = ".copy"
"""End of the name of the folder with the copies of `checkpoint.own_copy`."""
PARTIAL = ".partial"
"""End of the name of a folder with files that are not complete yet."""
_LOCK = ".lock"
FILES_MAX = 20_000
"""Files of one checkpoint; more are not looked at."""
METADATA_BYTES_MAX = 256 << 20
_OLDER_MAX = 32
"""Older checkpoints that one is compared with."""
_STATE = (".pt", ".pth", ".th", ".ckpt", ".bin", ".pkl", ".tar", ".safetensors", ".distcp")
_ZIP = b"PK\x03\x04"
_FICLONE = 0x40049409
"""Have a file share another's blocks (linux/fs.h)."""
_LAST = re.compile(
    r"trainer_state\.json|random_states_0\.pkl|custom_checkpoint_\d+\.pkl|meta\.pt|\.metadata"
)
"""Files that a library writes last into a folder: one that all older ones have has to be there."""
_OBJECTS = re.compile(r"(.*config|tokenizer|special_tokens_map|added_tokens|vocab)\.json")
"""Documents that end with a bracket."""
CHECKPOINT = re.compile(
    r"(checkpoint|ckpt|(global_?)?step|iter(ation)?|epoch)[-_=]?\d+|.*\.ckpt", re.IGNORECASE
)
"""Names of folders that are one checkpoint."""
_RANKED = re.compile(r"((?:bf16_)?zero_pp_rank_)\d+(_mp_rank_\d+_(?:model|optim)_states\.pt)")
"""Files of which each data-parallel rank writes one."""
_ENGINE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
"""Files with the engine's state; those of layers and of experts have none."""
_ESCAPED = re.compile(r"\[([*?[])\]")
"""A character that `glob.escape` made plain."""
_NUMBERED = re.compile(r"checkpoint-\d+")
_STEPS = ("optimizer", "scheduler.pt", "rng_state", "scaler.pt", "global_step")
"""Beginnings of names that the Trainer writes between its model and `trainer_state.json`."""
_WHY_MAX = 300
"""Characters of a reason: names of tensors may be long."""

State = Literal["whole", "torn", "unknown"]


class TornError(ValueError):
    """A load of this checkpoint must fail; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnCheckpoint:
    """Result of one check."""

    path: str
    state: State
    format: str = ""
    why: str = ""
    step: int = -1
    """The step in its name, or in the Trainer's state; -1 if neither has one."""
    written_s: float = 0.0
    """When it was written last, by the clock of its disk (Unix)."""
    bytes: int = 0

    @property
    def mark(self) -> tuple[object, ...]:
        """Return what a write changes."""
        return self.path, self.state, self.written_s, self.bytes


def examine(path: str, siblings: Sequence[str] = (), *, exact: bool = False) -> OwnCheckpoint:
    """Return what the checkpoint at `path` is; `siblings` are older ones of the same pattern.

    If the job does not declare the `exact` path, an empty file may be a mark beside a checkpoint.
    """
    step, written_s, size = _read_step(path), 0.0, 0
    try:
        if os.path.isdir(path):
            files = list_files(path)
            written_s = max((s.st_mtime for s in files.values()), default=os.stat(path).st_mtime)
            size = sum(s.st_size for s in files.values())
            format_, whole = _check_folder(path, files, siblings)
        else:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            written_s, size = status.st_mtime, status.st_size
            named = exact or CHECKPOINT.fullmatch(os.path.basename(path)) or path.endswith(_STATE)
            format_ = _check_file(path, size, any_name=True) if size or named else ""
            whole = bool(format_)
    except TornError as error:
        return OwnCheckpoint(path, "torn", "", str(error)[:_WHY_MAX], step, written_s, size)
    except Exception as error:  # Only a `TornError` means torn.
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return OwnCheckpoint(path, "unknown", "", why[:_WHY_MAX], step, written_s, size)
    why = "" if whole else "its format is not known"
    return OwnCheckpoint(path, "whole" if whole else "unknown", format_, why, step, written_s, size)


def _read_step(path: str) -> int:
    name = os.path.basename(path)
    found = re.search(r"step[=_-]?(\d+)", name) or re.search(r"(\d+)(?!.*\d)", name)
    return int(found[1]) if found else -1


def list_files(folder: str) -> dict[str, os.stat_result]:
    """Return the regular files of a folder and of those in it, by their path from there.

    Raises:
        OSError: a folder cannot be read, which says nothing of its files.
    """
    found: dict[str, os.stat_result] = {}
    for base, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = os.path.join(base, name)
            with contextlib.suppress(FileNotFoundError):  # It was a temporary name.
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):
                    found[os.path.relpath(path, folder)] = status
        if len(found) > FILES_MAX:
            raise ValueError(f"it has more than {FILES_MAX} files")
    return found


def read_sizes(path: str) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file of a checkpoint; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        files = list_files(path) if os.path.isdir(path) else {"": os.stat(path)}
        return {os.path.join(path, n): (s.st_size, s.st_mtime_ns) for n, s in files.items()}
    return {}


def _raise(error: OSError) -> None:
    raise error


def _read_size(path: str) -> int:
    """Return the bytes of a file, also of one behind a link; -1 if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_size
    return -1


# --- one file ------------------------------------------------------------------------------------


def _check_file(path: str, size: int, *, any_name: bool = False) -> str:
    """Return the format of a file that is whole; empty if it is not known.

    Without `any_name`, a file whose name is not one of a checkpoint's is not looked at.

    Raises:
        TornError: it is torn.
        OSError: it cannot be read.
    """
    name = os.path.basename(path)
    if not (any_name or name.endswith(_STATE)):
        return ""
    if size == 0:
        raise TornError(f"{name} is empty")
    if name.endswith(".safetensors"):
        try:
            read_safetensors(Path(path))
        except ValueError as error:
            raise TornError(f"{name}: {error}") from None
        return "safetensors"
    with open_file(path, follow=True) as file:
        head = file.read(4)
        if head != _ZIP and not (len(head) < 4 and _ZIP.startswith(head)):
            return ""  # An older form, which says nothing of its size.
        return _check_archive(name, file)


def _check_archive(name: str, file: BinaryIO) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        size = file.seek(0, io.SEEK_END)
        raise TornError(f"{name} ends at byte {size:,}, before its directory") from None
    return "torch.save" if any(n.endswith("data.pkl") for n in names) else ""


# --- a folder ------------------------------------------------------------------------------------


def _check_folder(
    folder: str, files: dict[str, os.stat_result], siblings: Sequence[str]
) -> tuple[str, bool]:
    """Return the format of a folder, and whether the folder is whole.

    Raises:
        TornError: it is torn.
        OSError: something of it cannot be read.
    """
    if not files and list_numbers(folder):
        raise TornError("it is empty")
    _refuse_several(folder, files)
    known: list[str] = []
    if any(name.endswith(".distcp") for name in files):
        known += _check_sharded(folder, files)
    for name, status in sorted(files.items()):
        known.append(_check_part(folder, name, status.st_size, files))
    format_ = _name_format(files)
    if (
        format_ == "Trainer"
        and "trainer_state.json" not in files
        and _has_steps(folder, files, siblings)
    ):
        raise TornError("trainer_state.json is missing, which the Trainer writes last")
    older = _list_common(folder, siblings)
    lacking = {name for name in older if _LAST.fullmatch(name)} - set(files)
    if lacking:
        raise TornError(f"{min(lacking)} is missing, which all older ones have")
    half = {_blank(name) for name in older} - {_blank(name) for name in os.listdir(folder)}
    if half and not format_:  # A save that goes on, or another kind of save.
        raise ValueError(f"{min(half)} is missing, which all older ones have")
    if pointer := find_ahead(folder):
        raise ValueError(f"{pointer} does not name it yet")
    if format_ == "DeepSpeed":
        _check_ranks(folder, files)
    format_ = format_ or next(filter(None, known), "")
    return format_, bool(format_ and any(known))


def _has_steps(folder: str, files: Iterable[str], siblings: Sequence[str]) -> bool:
    """Return whether the Trainer saves such folders itself: `save_model` alone writes no state."""
    older = [one for one in siblings if _NUMBERED.fullmatch(os.path.basename(one))]
    if not _NUMBERED.fullmatch(os.path.basename(folder)):
        return False
    if older:
        return any(_read_size(os.path.join(one, "trainer_state.json")) >= 0 for one in older)
    return any(name.startswith(_STEPS) for name in files)


def _check_ranks(folder: str, files: Collection[str]) -> None:
    """Refuse a folder of DeepSpeed that lacks a rank's file.

    Rank 0 writes `latest` after its own files, and waits for no other rank's. A folder on a node's
    own disk has the files of that node alone. With MiCS only the first group of ranks writes.

    Raises:
        TornError: a file is missing.
    """
    kinds = {found.groups() for name in files if (found := _RANKED.fullmatch(name))}
    states = [name for name in files if _ENGINE.fullmatch(name)]
    if not kinds or not states:
        return
    state: Any = None
    with contextlib.suppress(Exception):  # What it says is not understood.
        state = _read_archived(os.path.join(folder, min(states)))
    ranks = _look_up(state, "dp_world_size")
    some = _look_up(state, "ds_config", "zero_optimization", "mics_shard_size") not in (None, -1)
    local = _look_up(state, "ds_config", "checkpoint", "use_node_local_storage")
    for before, after in sorted(kinds) if isinstance(ranks, int) and not some and not local else ():
        for rank in range(ranks):
            if (name := f"{before}{rank}{after}") not in files:
                raise TornError(f"{name} is missing, which {ranks} ranks write one each of")


def _look_up(document: Any, *keys: str) -> Any:
    """Return what documents in one another have under `keys`; None if they have nothing."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _read_archived(path: str) -> Any:
    """Return the object in a file of `torch.save`, without its tensors."""
    with open_file(path, follow=True) as file, zipfile.ZipFile(file) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > METADATA_BYTES_MAX:
            return {}
        return _Inert(io.BytesIO(archive.read(name))).load()


def _refuse_several(folder: str, files: Iterable[str]) -> None:
    """Refuse a folder of checkpoints: what is torn there says nothing of the others.

    A folder that is named like one checkpoint may have a file for each rank.

    Raises:
        ValueError: it has folders alike, or no known format and files alike, or no number.
    """
    if CHECKPOINT.fullmatch(os.path.basename(folder)):
        return
    tops = [name.split("/")[0] for name in files if "/" in name]
    names = set(tops)
    if not _name_format(files):
        names |= {name for name in files if name.endswith(_STATE) and "-of-" not in name}
        if names and not list_numbers(folder):
            raise ValueError(f"it may hold several checkpoints; declare them: {folder}/*")
    if len({re.sub(r"\d+", "#", name) for name in names}) < len(names):
        raise ValueError(f"it holds several checkpoints; declare them: {folder}/*")


def _check_part(folder: str, name: str, size: int, files: Collection[str]) -> str:
    """Check one file of a folder; return its format."""
    path, (inner, base) = os.path.join(folder, name), os.path.split(name)
    if base.endswith(INDICES):
        shards = set(_read_json(path, name)["weight_map"].values())
        missing = [one for one in shards if _read_size(os.path.join(folder, inner, one)) < 0]
        if missing:
            raise TornError(f"{min(missing)} is missing, which {name} names")
    elif base == "trainer_state.json":
        _read_json(path, name)
    elif _OBJECTS.fullmatch(base) and _read_end(path) not in b"]}":
        _read_json(path, name)  # It may end with spaces, or be a plain value.
    elif base == "latest" and size < 4096 and any(n.endswith(DEEPSPEED) for n in files):
        tag = read_file(path, follow=True).decode().strip()
        if not tag or not os.path.isdir(os.path.join(folder, inner, tag)):
            raise TornError(f"{name} names {tag!r}, which is not there")
    return "" if base.endswith(".distcp") else _check_file(path, size)


def _read_json(path: str, name: str) -> Any:
    data = read_file(path, follow=True)
    try:
        return json.loads(data)
    except ValueError as error:
        raise TornError(f"{name} is cut off: {error}") from None


def _read_end(path: str) -> bytes:
    """Return the last byte of a file that is no space."""
    with open_file(path, follow=True) as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - 64))
        return file.read().rstrip()[-1:] or b"-"


def _name_format(files: Iterable[str]) -> str:
    """Return which library makes such a folder; empty if that is not certain."""
    names = set(files)
    if names & {"trainer_state.json", "training_args.bin"}:
        return "Trainer"
    if any(n.startswith("random_states_") for n in names):
        return "accelerate"
    if any(n.endswith(DEEPSPEED) for n in names):
        return "DeepSpeed"
    sharded = any(n == ".metadata" or (n.endswith(".distcp") and "/" not in n) for n in names)
    return "torch.distributed.checkpoint" if sharded else ""


def _list_common(folder: str, siblings: Sequence[str]) -> set[str]:
    """Return the files and folders that all of the newest siblings with a name like this have."""
    kind = _blank(os.path.basename(folder))
    alike = (one for one in siblings if _blank(os.path.basename(one)) == kind)
    several = [
        set(os.listdir(one)) for one in itertools.islice(filter(os.path.isdir, alike), _OLDER_MAX)
    ]
    return set.intersection(*several) if several else set()


def _blank(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _check_sharded(folder: str, files: Collection[str]) -> list[str]:
    """Compare the indices of torch.distributed.checkpoint with the sizes of their files."""
    for base in sorted({os.path.dirname(n) for n in files if n.endswith(".distcp")}):
        index = os.path.join(base, ".metadata")
        if index not in files:
            raise TornError(f"{index} is missing, which is written last")
        data = read_file(os.path.join(folder, index), METADATA_BYTES_MAX, follow=True)
        for name, end in _read_extents(index, data).items():
            path = os.path.join(base, name)
            size = _read_size(os.path.join(folder, path))
            if size < end:
                has = f"has {size:,} bytes of {end:,}" if size >= 0 else "is missing"
                raise TornError(f"{path} {has}")
    return ["torch.distributed.checkpoint"]


class _Any:
    """Stand-in for every class of a pickle, so that a load imports and calls nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Any]:
        return _Any

    def persistent_load(self, pid: Any) -> _Any:
        return _Any()


def _read_extents(name: str, data: bytes) -> dict[str, int]:
    """Return the files that an index names, with the number of bytes that each has at least."""
    try:
        index = _Inert(io.BytesIO(data)).load()
    except (EOFError, pickle.UnpicklingError) as error:
        raise TornError(f"{name}: {error}") from None
    extents: dict[str, int] = {}
    for entry in index.state["storage_data"].values():
        info = entry.state
        end = int(info["offset"]) + int(info["length"])
        extents[info["relative_path"]] = max(end, extents.get(info["relative_path"], 0))
    return extents


# --- those that a job declares -------------------------------------------------------------------


def find_root(pattern: str, cwd: str) -> str:
    """Return the folder before a pattern's first wildcard.

    >>> find_root("out/checkpoint-*", "/home/me")
    '/home/me/out'
    """
    parts = _locate_pattern(pattern, cwd).split(os.sep)
    plain = next((n for n, part in enumerate(parts) if _has_magic(part)), len(parts) - 1)
    return _ESCAPED.sub(r"\1", os.sep.join(parts[:plain])) or os.sep


def is_declared(path: str, pattern: str, cwd: str) -> bool:
    """Return whether a path is one of a pattern's, also if nothing is there.

    >>> [is_declared(f"/run/out/{name}", "out/ckpt*", "/run") for name in ("ckpt-3", "ckpt/x.py")]
    [True, False]
    """
    pairs = path.split(os.sep), _locate_pattern(pattern, cwd).split(os.sep)
    return len({*map(len, pairs)}) == 1 and all(map(fnmatch.fnmatchcase, *pairs))


def _locate_pattern(pattern: str, cwd: str) -> str:
    """Return a pattern from the root of the file system; brackets in `cwd` are no wildcards."""
    return os.path.normpath(os.path.join(glob.escape(cwd), os.path.expanduser(pattern)))


def _has_magic(pattern: str) -> bool:
    return glob.has_magic(_ESCAPED.sub("", pattern))


def list_declared(pattern: str, cwd: str) -> list[str]:
    """Return the checkpoints of a pattern, the newest first by number, then by time.

    Symbolic links are left out.
    """
    length = len(find_root(pattern, cwd))
    found = [p for p in glob.glob(_locate_pattern(pattern, cwd)) if not os.path.islink(p)]
    for end in (TORN, COPY, PARTIAL):
        found = [path for path in found if f"{end}/" not in path[length:]]
    return sorted(found, key=lambda p: (list_numbers(p), _read_time(p)), reverse=True)


def _read_time(path: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def find_newest(pattern: str, cwd: str) -> tuple[list[OwnCheckpoint], OwnCheckpoint | None]:
    """Return the torn ones that a script may take for the newest, and the newest whole one.

    A script may go by numbers or by time. If times are equal, a file without a number, such as
    `last.ckpt`, counts as newer.
    """
    paths = list_declared(pattern, cwd)
    places = {path: place for place, path in enumerate(paths)}
    known: dict[str, OwnCheckpoint] = {}
    newest: OwnCheckpoint | None = None
    sets = list_sets(paths)
    by_time = sorted(paths, key=lambda p: (_read_time(p), not list_numbers(p)), reverse=True)
    for order in (paths, by_time):
        for path in order:
            ranks, beside = sets[path]
            members = [one for one in (*ranks, *beside) if one in places and one not in known]
            exact = not _has_magic(pattern)
            found = [examine(one, paths[places[one] + 1 :], exact=exact) for one in members]
            known |= {one.path: one for one in _judge_together(found)}
            lacks = any(one not in places for one in beside)
            if not lacks and all(known[one].state == "whole" for one in ranks):
                newest = newest or known[path]
                break
    torn = {path: found for path, found in known.items() if found.state == "torn"}
    for one in [*torn.values(), *filter(None, [newest])]:
        torn |= {path: _judge_broken(path, why) for path, why in list_broken(one.path).items()}
    return list(torn.values()), newest


def _judge_together(files: list[OwnCheckpoint]) -> list[OwnCheckpoint]:
    """Return the files of one checkpoint: all are torn if one is, which comes last."""
    torn = [one for one in files if one.state == "torn"]
    if not torn:
        return files
    why = f"{os.path.basename(torn[0].path)} beside it is torn"
    others = [one for one in files if one.state == "unknown"]
    whole = [one for one in files if one.state == "whole"]
    time_s = max(one.written_s for one in torn)  # It is not moved while another is written.
    moved = [dataclasses.replace(one, state="torn", why=why, written_s=time_s) for one in whole]
    return [*others, *moved, *torn]


def _judge_broken(pointer: str, why: str) -> OwnCheckpoint:
    status = os.lstat(pointer)
    return OwnCheckpoint(pointer, "torn", "", why, -1, status.st_mtime, status.st_size)


def examine_alone(path: str) -> tuple[OwnCheckpoint, str]:
    """Return the check of an undeclared checkpoint, and a pattern for the names like its own."""
    pattern = _make_pattern(path)
    paths = list_declared(pattern, os.path.dirname(path))
    older = paths[paths.index(path) + 1 :] if path in paths else []
    return examine(path, older), pattern


def choose_place(path: str, root: str, cwd: str) -> str:
    """Return where a torn checkpoint goes: out of the folder `root`, which the script lists.

    It is on the same disk, although a part of the path may be a link to another one.
    """
    if not _share_disk(os.path.dirname(path), root):
        root = os.path.dirname(path)
    place = os.path.join(name_beside(root, cwd, TORN), os.path.relpath(path, root))
    target, number = place, 1
    while os.path.lexists(target):
        number += 1
        target = f"{place}-{number}"
    return target


def is_set_aside(path: str) -> bool:
    """Return whether a file lies in a folder that torn checkpoints were moved to.

    >>> is_set_aside("results/out.torn/checkpoint-3/model.safetensors")
    True
    """
    return any(part.endswith(TORN) for part in path.split("/")[:-1])


def locate_copy(path: str, root: str, cwd: str) -> str:
    """Return where the copy of an overwritten checkpoint is kept."""
    return os.path.join(name_beside(root, cwd, COPY), os.path.relpath(path, root))


def name_beside(root: str, cwd: str, end: str) -> str:
    """Return a folder beside `root`.

    It is a hidden one in `root` if nothing can be made beside it, or if that is another disk. It
    is one as well if `root` is the script's own folder.
    """
    beside = os.path.dirname(root)
    inside = root == os.path.normpath(cwd) or not _share_disk(root, beside)
    inside = inside or not os.access(beside, os.W_OK)
    return os.path.join(root, end) if inside else root + end


def _share_disk(one: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(one).st_dev == os.stat(other).st_dev
    return True


def set_aside(path: str, target: str, whole: str, until_s: float = math.inf) -> None:
    """Move a torn checkpoint or pointer; all pointers to it name the `whole` one instead.

    A pointer is never missing if a whole one exists: without it, a script begins from step 0.

    Raises:
        TimeoutError: the disk answered late (`until_s`, monotonic), and ranks may write again.
        OSError: it cannot be moved; it is where it was.
    """
    folder, pointer = os.path.dirname(path), is_pointer(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if whole and os.path.dirname(whole) != folder:  # Each run of a pattern has its own pointers.
        like = os.path.join(folder, os.path.basename(whole if pointer else path))
        found = find_newest(_make_pattern(like), folder)[1]
        whole = found.path if found else ""
    _refuse_late(until_s)
    if pointer and whole and path in list_broken(whole):
        shutil.copyfile(path, target, follow_symlinks=False)
        lead(path, find_twin(whole, os.path.realpath(path)), link=os.path.islink(path))
        return
    naming = list_naming(path)
    for one in naming if whole else ():
        lead(one, find_twin(whole, path), link=os.path.islink(one))
    os.rename(path, target)
    sync_path(folder)
    for one in naming:
        if not whole and not os.path.islink(one):
            with contextlib.suppress(OSError):
                os.rename(one, f"{target}.{os.path.basename(one)}")


def _refuse_late(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError("it took too long")


def _make_pattern(path: str) -> str:
    """Return a pattern for the names like that of `path`."""
    folder, name = os.path.split(path)
    return os.path.join(glob.escape(folder), re.sub(r"\d+", "*", glob.escape(name)))


# --- a copy of the last whole one ----------------------------------------------------------------


@contextlib.contextmanager
def open_room(rooms: str) -> Iterator[str]:
    """Yield a folder in `rooms` for files that are not complete; it is removed afterwards.

    It is locked until then. `clear_rooms` removes those of killed processes.
    """
    room = os.path.join(rooms, os.urandom(4).hex())
    os.makedirs(room)
    try:
        with open(os.path.join(room, _LOCK), "wb") as lock:
            with contextlib.suppress(OSError):  # A file system without locks.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(rooms)


def clear_rooms(pattern: str, cwd: str) -> None:
    """Remove what processes have left that were killed during a copy.

    Raises:
        OSError: a folder cannot be read.
    """
    root = find_root(pattern, cwd)
    parents = {name_beside(root, cwd, PARTIAL)}
    for path in list_declared(pattern, cwd):
        for place in (locate_copy(path, root, cwd), choose_place(path, root, cwd)):
            parents.add(os.path.join(os.path.dirname(place), PARTIAL))
    for rooms in filter(os.path.isdir, parents):
        for name in os.listdir(rooms):
            room = os.path.join(rooms, name)
            with contextlib.suppress(OSError):
                os.rmdir(room)  # Its process was killed before it had a lock.
            with contextlib.suppress(OSError), open(os.path.join(room, _LOCK), "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(room, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(rooms)


def copy_whole(path: str, target: str, until_s: float = math.inf, *, rooms: str = "") -> bool:
    """Copy the file at `path` if it is whole; return whether `target` is a copy of it now.

    The copy shares the file's blocks if the file system can. A copy of a file that changed during
    the copy is dropped. Until it is complete it lies in `rooms`.

    Raises:
        TimeoutError: the copy was not complete at `until_s` (monotonic).
        OSError: there is no room, or it cannot be read.
    """
    before = os.stat(path)
    with contextlib.suppress(OSError):
        now = os.stat(target)
        if (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size):
            return True
    with contextlib.suppress(TornError):
        if not _check_file(path, before.st_size, any_name=True):
            return False  # It would be copied once more after the save.
        with open_room(rooms or os.path.join(os.path.dirname(target), PARTIAL)) as room:
            temporary = os.path.join(room, os.path.basename(path))
            _copy_bytes(path, temporary, until_s)
            after = os.stat(path)
            same = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
            if not same or not _check_file(temporary, after.st_size, any_name=True):
                return False
            sync_path(temporary)  # It takes long, and the script may begin its next save.
            _refuse_late(until_s)
            os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.replace(temporary, target)
            return True
    return False


def _copy_bytes(path: str, target: str, until_s: float) -> None:
    with open_file(path, follow=True) as source, open(target, "wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
        except OSError:
            while chunk := source.read(4 << 20):
                _refuse_late(until_s)
                copy.write(chunk)


def put_back(copy: str, path: str, target: str, until_s: float = math.inf) -> bool:
    """Have the copy take the place of the torn file at `path`, which is kept at `target`.

    Return whether it does. `path` is never missing: without it, a script begins from step 0, and
    its first save overwrites the copy.

    Raises:
        TimeoutError: the copy was not complete at `until_s` (monotonic).
        OSError: there is no room, or no copy.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(path, target)
    except FileExistsError:  # Another node sees the same folder, and was faster.
        pass
    except OSError:  # A file system without links.
        shutil.copyfile(path, target)
    done = False
    try:
        # Not in the script's folder: scripts list theirs.
        rooms = os.path.join(os.path.dirname(target), PARTIAL)
        done = copy_whole(copy, path, until_s, rooms=rooms)
    finally:
        if not done:
            os.unlink(target)
    return done
