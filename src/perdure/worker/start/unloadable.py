"""The torn checkpoint that a script failed to load, if it failed of one.

The variables of the traceback's frames say which files the script had at hand. Each is examined as
`perdure.files.own` does; only one that is torn is named.
"""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from perdure.files.own import CHECKPOINT, OwnCheckpoint, choose_place, examine_alone, find_newest

_LOADING = re.compile(
    r"central directory|PytorchStreamReader|SafetensorError|incomplete metadata|UnpicklingError|"
    r"pickle data was truncated|EOFError|BadZipFile|CheckpointException|JSONDecodeError|"
    r"FileNotFoundError|failed to read|HeaderTooLarge|HeaderTooSmall"
)
"""Errors of torch, safetensors, json and pickle about a file that is cut."""
_PATHS_MAX = 64


def find_unloadable(value: BaseException, trace: TracebackType | None) -> tuple[str, str]:
    """Return the torn checkpoint that a load failed of, and what to do; empty if there is none."""
    if not _LOADING.search(f"{type(value).__name__}: {value}"):
        return "", ""
    found: OwnCheckpoint | None = None
    for path in _list_paths(value, trace):
        one, _ = examine_alone(path)
        if one.state == "torn" and (found is None or found.path.startswith(f"{path}/")):
            found = one
    return ("", "") if found is None else (found.path, describe_torn(found, os.getcwd()))


def describe_torn(torn: OwnCheckpoint, cwd: str) -> str:
    """Return what is wrong with a checkpoint that is not declared, and how to go on without it."""
    pattern = examine_alone(torn.path)[1]
    whole = find_newest(pattern, cwd)[1]

    def shorten(path: str) -> str:
        short = os.path.relpath(path, cwd)
        return path if short.startswith("..") else short

    target = choose_place(torn.path, os.path.dirname(torn.path), cwd)
    move = f"mkdir -p {shlex.quote(shorten(os.path.dirname(target)))} && mv "
    move += f"{shlex.quote(shorten(torn.path))} {shlex.quote(shorten(target))}"
    older = f"the newest whole one is {shorten(whole.path)}" if whole else "nothing older is whole"
    at = time.strftime("%F %T", time.localtime(torn.written_s))
    keys = f'checkpoint.own = ["{shorten(pattern)}"]'
    keys += "" if "*" in pattern else " and own_copy = true"
    return (
        f"{shorten(torn.path)} ({torn.why}), cut at {at}; {older}; to load it: {move}; "
        f"to have this done: {keys}"
    )


def _list_paths(value: BaseException, trace: TracebackType | None) -> Iterator[str]:
    """Yield the checkpoints that the failed frames have at hand, the outermost frame first."""
    seen: set[str] = set()
    for text in (*_list_texts(trace), getattr(value, "filename", None)):
        if not isinstance(text, str) or not 0 < len(text) < 4096 or len(seen) > _PATHS_MAX:
            continue
        path = os.path.abspath(text)
        for one in (os.path.dirname(path), path):
            if one in seen or not os.path.exists(one):
                continue
            seen.add(one)
            if os.path.isfile(one) or CHECKPOINT.fullmatch(os.path.basename(one)):
                yield one


def _list_texts(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        for held in list(trace.tb_frame.f_locals.values()):
            with contextlib.suppress(Exception):  # Objects of the script may do anything.
                yield os.fspath(held) if isinstance(held, (str, os.PathLike)) else held.name
        trace = trace.tb_next
