"""How a rank ended: its status, and what it left behind about the reason."""

import contextlib
import glob
import json
import os
import signal
from collections.abc import Collection
from resource import struct_rusage
from typing import Any, BinaryIO

import msgspec

from perdure.files import replace_file
from perdure.files.regular import open_regular
from perdure.files.rotation import measure_file, read_piece
from perdure.model.bus.wire import RankLaunch
from perdure.model.failures import ExitRecord
from perdure.model.fitting import cut_text, fit_event
from perdure.model.records import encode_record
from perdure.worker.start.failure import RESERVED_BYTES

_TAIL_BYTES = 1 << 16
_LAST_LINES = 20
_LINE_MAX = 4096
_ERROR_MAX = 4096
_TRACEBACK_MAX = 65_536
_TOGETHER_BYTES_MAX = 8 << 20
"""Of all ranks' records, where they are told at once."""
_JSON_BYTES_MAX = 64 << 20
"""Of a script's own error file: a larger one is not read."""
_TRACEBACK = "Traceback (most recent call last):"


class Evidence(msgspec.Struct, frozen=True):
    """The files and records that tell of a rank's end."""

    stdout: str = ""
    stderr: str = ""
    error_file: str = ""
    """TORCHELASTIC_ERROR_FILE."""
    traceback_file: str = ""
    stdout_from: int = 0
    """Sizes of the streams before the rank began: they are appended to."""
    stderr_from: int = 0
    refused: str = ""
    """Why it could not be started; it has none of these files then."""


def prepare_evidence(launch: RankLaunch, own: str) -> Evidence:
    """Make the directories of a rank's files, and note where its evidence will lie.

    `own` is perdure's own error file of that rank.
    """
    error_file = launch.env.get("TORCHELASTIC_ERROR_FILE", "")
    traceback_file = f"{own.removesuffix('.json')}.traceback.json"
    for path in filter(None, (launch.stdout, launch.stderr, launch.ring, error_file, own)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    before = glob.escape(os.path.dirname(own)) + f"/g*-r{launch.rank}.traceback.json"
    for path in glob.glob(before):  # What a keeper that was killed has reserved.
        _give_back(path)
    for path in filter(None, (error_file, traceback_file)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    _reserve(traceback_file)
    return Evidence(
        stdout=launch.stdout,
        stderr=launch.stderr,
        error_file=error_file,
        traceback_file=traceback_file,
        stdout_from=measure_file(launch.stdout),
        stderr_from=measure_file(launch.stderr),
    )


def _reserve(path: str) -> None:
    """Keep room for what a rank's last exception says, as far as there is any."""
    with contextlib.suppress(OSError), open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def _give_back(path: str) -> None:
    """Remove what was reserved and not used."""
    with contextlib.suppress(OSError):
        with _open(path) as file:
            unused = file.read(1) in (b"", b"\0")
        if unused:
            os.unlink(path)


def make_record(
    *,
    rank: int,
    generation: int,
    pid: int,
    at_s: float,
    status: int,
    usage: struct_rusage,
    asked: bool,
    oom_kills: int,
    evidence: Evidence,
    ended_for: str = "",
    saving: str = "",
) -> ExitRecord:
    """Return the record of a rank that ended with wait status `status`.

    `oom_kills` is by how much the kernel's counter has grown that no other rank accounts for. That
    it ended, and how, is known for certain: whatever is wrong with what it left behind, this much
    is recorded. A rank that an exception had ended, and that was killed `ended_for` some reason,
    ended by its exception.
    """
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = 0 if number else os.waitstatus_to_exitcode(status)
    if ended_for and number == signal.SIGKILL:
        number, code = 0, 1
    error, traceback, last = "", "", _read_lines("", 0)
    own: dict[str, Any] = {}
    try:
        last = _read_lines(evidence.stderr, evidence.stderr_from)
        last = last or _read_lines(evidence.stdout, evidence.stdout_from)
        if code or number:
            error, traceback = choose_error(evidence)
            own = _read_json(evidence.traceback_file) or {}
    except Exception as fault:
        error = f"what it left behind cannot be read: {fault!r}"
    if ended_for and code:
        error = f"{error}; {ended_for}"
    _give_back(evidence.traceback_file)
    return ExitRecord(
        rank=rank,
        generation=generation,
        pid=pid,
        at_s=at_s,
        code=code,
        signal=number,
        oom=number == signal.SIGKILL and not asked and oom_kills > 0,
        asked=asked,
        error=cut_text(error, _ERROR_MAX),
        traceback=cut_text(traceback, _TRACEBACK_MAX),
        last_output=tuple(cut_text(line, _LINE_MAX) for line in last),
        cpu_s=usage.ru_utime + usage.ru_stime,
        max_rss_bytes=usage.ru_maxrss * 1024,
        torn=cut_text(str(own.get("torn", "")), _ERROR_MAX),
        torn_why=cut_text(str(own.get("torn_why", "")), _ERROR_MAX),
        saving=cut_text(saving, _ERROR_MAX),
    )


def has_raised(evidence: Evidence) -> bool:
    """Return whether an exception has ended the script of a rank that lives."""
    try:
        return os.stat(evidence.traceback_file).st_size not in (0, RESERVED_BYTES)
    except OSError:
        return False


def choose_error(evidence: Evidence) -> tuple[str, str]:
    """Return the exception's last line and its traceback: torch's, ours, or read off stderr."""
    if evidence.refused:
        return evidence.refused, ""
    found = _read_json(evidence.error_file)
    if found is not None:
        error, traceback = _parse_torch_error(found)
        if error:
            return error, traceback
    found = _read_json(evidence.traceback_file)
    if found is not None:
        return str(found.get("error", "")), str(found.get("traceback", ""))
    return parse_traceback(_read_tail(evidence.stderr, evidence.stderr_from))


def parse_traceback(text: str) -> tuple[str, str]:
    """Return the last traceback in `text` and its last line; empty strings if there is none."""
    start = text.rfind(_TRACEBACK)
    if start < 0:
        return "", ""
    lines = text[start:].splitlines()
    for number, line in enumerate(lines[1:], 1):
        if line and not line[0].isspace():
            return line, "\n".join(lines[: number + 1])
    return "", "\n".join(lines)


def fit_records(records: Collection[ExitRecord]) -> tuple[ExitRecord, ...]:
    """Return `records` with their texts cut where one message could not hold them all."""
    share = _TOGETHER_BYTES_MAX // max(len(records), 1)
    return tuple(fit_event(record, share) or record for record in records)


def write_record(path: str, record: ExitRecord) -> None:
    """Put `record` at `path`, whole or not at all, and on the disk before returning.

    Raises:
        OSError: the disk is full or gone.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    replace_file(path, encode_record(record), synced=True)


def _parse_torch_error(found: dict[str, Any]) -> tuple[str, str]:
    """Return what `torch.distributed.elastic`'s `record` has written."""
    message = found.get("message", "")
    if not isinstance(message, dict):
        return str(message).strip().split("\n")[0], str(message)
    extra = message.get("extraInfo")
    traceback = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(message.get("message", "")).strip().split("\n")[0], str(traceback)


def _open(path: str) -> BinaryIO:
    """Open a file that a script may have replaced by anything; a pipe must hold nobody up."""
    return open(path, "rb", opener=open_regular)


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with _open(path) as file:
            data = file.read(_JSON_BYTES_MAX + 1)
        found = json.loads(data[:_JSON_BYTES_MAX].decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_tail(path: str, start: int) -> str:
    with contextlib.suppress(OSError), _open(path):  # Whatever else lies there is not read.
        end = measure_file(path)
        begin = max(start, end - _TAIL_BYTES)
        return read_piece(path, begin, end - begin)[1].decode("utf-8", "replace")
    return ""


def _read_lines(path: str, start: int) -> list[str]:
    return _read_tail(path, start).splitlines()[-_LAST_LINES:]
