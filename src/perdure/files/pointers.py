"""Small files and links beside checkpoints that name the one to begin at.

A script begins where its pointer says. If the pointer is torn, or if nothing of that name is there,
the script fails or begins from step 0.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from perdure.files import replace_file
from perdure.files.regular import read_file

DEEPSPEED = ("model_states.pt", "optim_states.pt")
"""Ends of the names of DeepSpeed's files."""
_BYTES_MAX = 1 << 20
_NEWEST = re.compile(r"(^|[-_.])(last|latest)([-_.]|$)", re.IGNORECASE)
_PART = re.compile(r"(?:rank|shard|part|stage|(?<![a-z])[tpd]p|mp)[-_]?\d+", re.IGNORECASE)
"""Part of a file's name that says which of several files of one checkpoint it is."""


@dataclass(frozen=True, slots=True)
class _Kind:
    names: re.Pattern[str]
    """Names of the checkpoints that a pointer of this kind may name."""
    text: str
    """What it says of one; `path` is a path or a name."""


_KINDS = {
    "latest": _Kind(re.compile(r".*"), "{name}"),  # DeepSpeed, GPT-NeoX
    "latest_checkpointed_iteration.txt": _Kind(  # Megatron-LM, verl
        re.compile(r"(iter_|global_step_?)\d+"), "{number}"
    ),
    "latest_checkpointed_iteration.json": _Kind(  # lm-engine
        re.compile(r"global_step\d+"), '{{"latest_checkpointed_iteration": {number}}}'
    ),
    "latest.txt": _Kind(re.compile(r"\d+"), "{number}"),  # nanotron
    "last_checkpoint": _Kind(re.compile(r".*\.pth"), "{path}"),  # Detectron2, MMEngine
    "LATEST.txt": _Kind(re.compile(r".*step_\d+"), "{name}"),  # NeMo AutoModel
}
_COPIES = {"latest_train_state.pt": "train_state.pt"}
"""Copy of a file of the checkpoint that it names: Megatron-Bridge."""


@dataclass(frozen=True, slots=True)
class _Pointer:
    path: str
    named: str | None
    """The checkpoint that it names; empty if that is not there, None if it is not understood."""
    why: str = ""


def list_numbers(path: str) -> list[int]:
    """Return the numbers in the last part of a path."""
    return [int(number) for number in re.findall(r"\d+", os.path.basename(path))]


def list_parts(path: str) -> list[str]:
    """Return which file of a checkpoint of several files this is.

    >>> list_parts("out/checkpoint_2_500-model_part-0-shard7.pt")
    ['part-0', 'shard7']
    """
    return _PART.findall(os.path.basename(path))


def list_sets(paths: Iterable[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the files of the same checkpoint for each path, of `paths` newest first.

    First its ranks or shards, counted from 0. Then the files of other names with the same numbers,
    if each older step has both names or neither. A pattern stands for such a file that is missing.

    >>> list_sets(["step-5-rank0.pt", "step-5-rank1.pt", "lora-rank8.pt"])["lora-rank8.pt"]
    (['lora-rank8.pt'], [])
    >>> list_sets(["G_20.pth", "D_20.pth", "G_10.pth", "D_10.pth"])["G_20.pth"]
    (['G_20.pth'], ['D_20.pth'])
    """
    steps: dict[tuple[str, str], dict[str, list[str]]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        bare = _PART.sub("#", name)
        kind, numbers = re.sub(r"\d+", "*", bare), " ".join(re.findall(r"\d+", bare))
        kinds = steps.setdefault((folder, numbers), {})
        kinds.setdefault(os.path.join(folder, kind), []).append(path)
    found: dict[str, tuple[list[str], list[str]]] = {}
    marks: dict[str, int] = {}  # Name -> hash of the older steps that have it
    groups: dict[int | None, list[str]] = {}  # Names that have had this hash
    for step, kinds in reversed(steps.items()):
        now = {kind: hash((marks.get(kind), step)) for kind in kinds}
        counted = {kind for kind, members in kinds.items() if any(map(_is_first, members))}
        for kind, members in kinds.items():
            mark = marks.get(kind)
            alike = [one for one in groups.get(mark, []) if marks[one] == mark and one != kind]
            beside = [path for one in alike for path in kinds.get(one, [one])]
            for one in members:
                own = [path for path in beside if list_parts(path) in ([], list_parts(one))]
                all_ = beside if counted & {kind, *alike} or not list_parts(one) else own
                found[one] = (members if kind in counted else [one], all_)
            groups.setdefault(now[kind], []).append(kind)
        marks |= now
    return found


def _is_first(path: str) -> bool:
    """Return whether it is the file of rank 0, or of shard 0."""
    parts = list_parts(path)
    return bool(parts) and not any(list_numbers(" ".join(parts)))


def find_twin(whole: str, path: str) -> str:
    """Return the file of the checkpoint `whole` whose name differs from `path` by the step alone.

    It is `whole` itself if there is no such file. Beside ba4-rank1.pt it is ba4-rank0.pt for
    ba5-rank0.pt, and beside g_00000400 it is do_00000400 for do_00000500.
    """
    numbers = iter(re.findall(r"\d+", _PART.sub("#", os.path.basename(whole))))
    split = re.compile(rf"({_PART.pattern})|\d+", re.IGNORECASE)
    name = split.sub(lambda one: one[1] or next(numbers, one[0]), os.path.basename(path))
    twin = os.path.join(os.path.dirname(whole), name)
    other = os.path.realpath(twin) != os.path.realpath(path)  # A part of one may be a link.
    return twin if other and os.path.exists(twin) else whole


def find_stand_in(whole: str, path: str) -> str:
    """Return the file that may take the place of `path`, the newest one by its name.

    It is `whole`, or the file of the same rank beside it; empty if there is none.

    >>> find_stand_in("out/step=40.ckpt", "out/last.ckpt")
    'out/step=40.ckpt'
    """
    place, parts = (os.path.dirname(path), os.path.splitext(path)[1]), list_parts(path)
    like = (os.path.dirname(whole), os.path.splitext(whole)[1]) == place
    if not is_newest(path) or not like or len(parts) != len(list_parts(whole)):
        return ""
    others = iter(parts)
    name = _PART.sub(lambda _: next(others), os.path.basename(whole))
    return os.path.join(place[0], name)


def is_newest(path: str) -> bool:
    """Return whether its name says that a file or a link is the newest checkpoint.

    >>> is_newest("out/last-v1.ckpt"), is_newest("out/blast.ckpt")
    (True, False)
    """
    return bool(_NEWEST.search(os.path.basename(path)))


def is_pointer(path: str) -> bool:
    """Return whether a path has the name of a pointer, or is a link."""
    return os.path.basename(path) in (*_KINDS, *_COPIES) or os.path.islink(path)


def find_ahead(path: str) -> str:
    """Return the pointer that names an older one than `path`: libraries write it last."""
    for pointer in _read_files(path):
        numbers = list_numbers(pointer.named or "")
        if numbers and numbers < list_numbers(path):
            return os.path.basename(pointer.path)
    return ""


def list_naming(path: str) -> list[str]:
    """Return the files and links that name the checkpoint at `path`."""
    real = os.path.realpath(path)
    pointers = [*_read_files(path), *_read_links(path)]
    return [one.path for one in pointers if one.named and os.path.realpath(one.named) == real]


def list_broken(path: str) -> dict[str, str]:
    """Return the pointers beside a checkpoint that name nothing, each with the reason."""
    pointers = [*_read_files(path), *_read_links(path)]
    return {one.path: one.why for one in pointers if one.named == ""}


def _read_files(path: str) -> Iterator[_Pointer]:
    folder, name = os.path.split(path)
    for file, kind in _KINDS.items():
        pointer = os.path.join(folder, file)
        if not kind.names.fullmatch(name) or (file == "latest" and not _has_states(path)):
            continue
        with contextlib.suppress(OSError):
            text = os.fsdecode(read_file(pointer, _BYTES_MAX)).strip()
            why = f"it names {text[:100]!r}, which is not there"
            yield _Pointer(pointer, _find_named(path, kind, text), why)
    for file, inner in _COPIES.items() if re.fullmatch(r"iter_\d+", name) else ():
        pointer = os.path.join(folder, file)
        with contextlib.suppress(OSError):
            named = _find_copied(folder, read_file(pointer, _BYTES_MAX), inner)
            yield _Pointer(pointer, named, f"no checkpoint has a {inner} like it")


def _has_states(path: str) -> bool:
    """Return whether a folder has a file of DeepSpeed."""
    with contextlib.suppress(OSError):
        return any(name.endswith(DEEPSPEED) for name in os.listdir(path))
    return False


def _find_named(path: str, kind: _Kind, text: str) -> str | None:
    """Return what a text names among the checkpoints like `path`; see `_Pointer.named`."""
    folder, name = os.path.split(path)
    if not text or "\0" in text:
        return ""
    tags = [text, os.path.basename(text)]
    sure = os.path.basename(os.path.dirname(text)) in ("", os.path.basename(folder))
    if "{number}" in kind.text:
        number, digits = re.fullmatch(r"\D*(\d+)\D*", text), re.search(r"\d+$", name)
        if not number or not digits:
            return None  # Megatron-LM's `release`
        bare = number[1].lstrip("0") or "0"
        numbers = bare, bare.zfill(len(digits[0]))
        tags, sure = [name[: digits.start()] + one for one in numbers], True
    paths = [os.path.join(folder, tag) for tag in tags if tag]
    return next(filter(os.path.exists, paths), "" if sure else None)


def _find_copied(folder: str, data: bytes, inner: str) -> str:
    for name in sorted(os.listdir(folder)):
        with contextlib.suppress(OSError):
            if read_file(os.path.join(folder, name, inner), _BYTES_MAX) == data:
                return os.path.join(folder, name)
    return ""


def _read_links(path: str) -> Iterator[_Pointer]:
    """Yield the links beside a checkpoint.

    A link that leads to nothing is broken on two conditions. It is the newest by its name, and its
    target was or is in this folder. Links of several ranks lead to a file each.
    """
    folder, name = os.path.split(path)
    links: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        links = sorted(entry.path for entry in entries if entry.is_symlink())
    for link in links:
        target = os.path.realpath(link)
        named: str | None = target
        if not os.path.exists(link):
            alike = os.path.splitext(link)[1] == os.path.splitext(name)[1]
            alike = alike and list_parts(link) == list_parts(name)
            here = os.path.dirname(target) == os.path.realpath(folder) or os.path.exists(
                os.path.join(folder, os.path.basename(target))
            )
            named = "" if alike and here and is_newest(link) else None
        yield _Pointer(link, named, f"it leads to {os.path.basename(target)}, which is not there")


def lead(pointer: str, whole: str, *, link: bool) -> None:
    """Have a pointer, or a `link`, name the checkpoint `whole`; it is never missing.

    Raises:
        OSError: the disk does not take it; the pointer is as it was.
    """
    folder, file = os.path.split(pointer)
    if link:
        temporary = os.path.join(folder, f".{file}.{os.urandom(4).hex()}")
        os.symlink(os.path.relpath(whole, folder), temporary)
        os.replace(temporary, pointer)
    elif file in _COPIES:
        replace_file(
            pointer, read_file(os.path.join(whole, _COPIES[file]), _BYTES_MAX), synced=True
        )
    elif file in _KINDS:
        old = b""
        with contextlib.suppress(OSError):
            old = read_file(pointer, _BYTES_MAX).strip()
        before, name = os.path.dirname(os.fsdecode(old)), os.path.basename(whole)
        number, path = (list_numbers(whole) or [0])[-1], os.path.join(before, name)
        text = _KINDS[file].text.format(name=name, number=number, path=path if old else whole)
        replace_file(pointer, os.fsencode(text), synced=True)
