"""Files on the box: scripts mended after a push, results listed before a pull. Only Python.

python3 results.py repair FOLDER   line ends and execute bits of scripts
python3 results.py manifest JSON   roster of results with sizes and SHA-256
python3 results.py digest FOLDER   of a package, to see whether it is the same as here
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER = "@@perdure-json "
"""Begins the one line of standard output that is the answer: shells may print banners."""


def main(argv: list[str]) -> int:
    """Run one of the commands above; return the exit code."""
    command, argument = argv
    answers: dict[str, Callable[[str], Any]] = {
        "repair": repair,
        "manifest": lambda text: make_manifest(json.loads(text)),
        "digest": digest_package,
    }
    answer = json.dumps(answers[command](argument))
    failpoint("results/told", command)
    print(ANSWER + answer)
    return 0


def locate(path: str) -> str:
    """Return `path` with variables, as the shell there would have it."""
    return os.path.normpath(os.path.expanduser(os.path.expandvars(path)))


def repair(folder: str) -> dict[str, Any]:
    """Mend scripts below `folder` that came from another system; return their names.

    A carriage return at a line's end breaks `sh`, a missing execute bit a shebang.
    """
    ends, bits = [], []
    for path in walk(locate(folder), ()):
        if os.path.islink(path) or not os.path.exists(path):
            continue  # What an earlier repair has left when it was killed goes with the first.
        with open(path, "rb") as file:
            head = file.read(2)
            if head != b"#!" and not path.endswith(".sh"):
                continue
            data = head + file.read()
        mode = os.stat(path).st_mode
        if b"\r\n" in data:
            with open(path + ".perdure", "wb") as file:
                file.write(data.replace(b"\r\n", b"\n"))
            failpoint("results/mend")
            os.chmod(path + ".perdure", mode)
            os.rename(path + ".perdure", path)
            ends.append(path)
        if head == b"#!" and not mode & 0o100:
            os.chmod(path, mode | ((mode & 0o444) >> 2))
            bits.append(path)
    return {"line_ends": ends, "execute_bits": bits}


def make_manifest(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the roster: label/path, bytes, stamp and SHA-256 of each file.

    `wanted`: `roots` (label -> folder of results), `skip` (label -> patterns of names left out
    there), `areas` (label -> folder in which a job may have left what nobody named), `exclude`
    (patterns of names left out of them), `hide` (folders that are no part of them), `home` (state
    of jobs, others' among them), `leave` (patterns of files that a person leaves behind),
    `elsewhere` (label of what is in none of them, and was written in the last `age_s`) and `hash`
    (else only names and sizes).
    A link among the results is refused: what it points to would not be pulled.
    """
    roots = {label: locate(root) for label, root in wanted["roots"].items()}
    areas = {label: locate(root) for label, root in wanted.get("areas", {}).items()}
    told: dict[str, Any] = {
        "files": [], "links": [], "left": [], "excluded": [], "unread": [], "others": [],
        "roots": {**roots, **areas},
    }  # fmt: skip
    found: list[tuple[str, str]] = []
    for label, root in sorted(roots.items()):
        patterns = tuple(wanted["skip"].get(label, ()))
        found += [(label, path) for path in walk(root, patterns, told["unread"])]
    hidden = {locate(path) for path in wanted.get("hide", ())} | {*roots.values(), *areas.values()}
    for label, root in sorted(areas.items()):
        if any(is_below(root, one) for one in roots.values()):
            continue  # All of it is a result already.
        paths = walk_area(root, hidden - {root}, tuple(wanted["exclude"]), told)
        found += [(label, path) for path in paths]
    if wanted.get("elsewhere"):
        told["roots"][wanted["elsewhere"]] = "/"
        paths = walk_elsewhere(roots, hidden, wanted, told)
        found += [(wanted["elsewhere"], path) for path in paths]
    told["others"] += list_jobs(wanted.get("home", ""), list(roots.values()))
    seen = [os.path.realpath(one) for one in (*roots.values(), *areas.values())]
    unseen = [os.path.realpath(one) for one in (*hidden, *told["excluded"])]
    unseen = [one for one in unseen if one not in seen]
    for label, path in found:
        name = os.path.relpath(path, told["roots"][label])
        known = None if label in roots else (seen, unseen)
        describe(f"{label}/{name}", path, wanted, told, known)
    return told


def describe(
    name: str, path: str, wanted: dict[str, Any], told: dict[str, Any], known: Any
) -> None:
    """Add a file to what is told; a link of an area is none where it leads to what is looked at.

    `known` are the folders that are, and those in them that are not; None for a result.

    A name that is no text cannot be sent, and is told as what cannot be read.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        name = os.fsencode(name).decode("utf-8", "backslashreplace")
        if not leaves(name, wanted.get("leave", ())):
            told["unread"].append(f"{name}: its name is no UTF-8")
        return
    leaving = leaves(name, wanted.get("leave", ()))
    try:
        if os.path.islink(path):
            real = os.path.realpath(path)
            if known is None and not leaving:
                told["links"].append(name)
            elif known and not leaving and os.path.exists(real) and not is_seen(real, *known):
                told["unread"].append(f"{name}: a link to {real}, outside of what is looked at")
            return
        stat = os.stat(path)
        row = {"path": name, "bytes": stat.st_size, "sha256": "",
               "stamp": f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"}  # fmt: skip
        if wanted.get("hash", True) and not leaving:
            row["bytes"], row["sha256"] = hash_file(path)
    except FileNotFoundError:
        return  # It went while it was looked at: a job may run.
    except OSError as error:
        told["unread"].append(f"{name}: {error.strerror}")
        return
    told["left" if leaving else "files"].append(row)


def is_seen(real: str, seen: list[str], unseen: list[str]) -> bool:
    """Return whether `real`, where a link leads, is looked at: the innermost folder decides.

    >>> is_seen("/d/.cache/w.pt", ["/d"], ["/d/.cache"]), is_seen("/d/w.pt", ["/d"], ["/d/.cache"])
    (False, True)
    """
    depths = [
        max([len(one) for one in ones if is_below(real, one)] or [0]) for ones in (seen, unseen)
    ]
    return depths[0] > depths[1]


def leaves(path: str, patterns: Any) -> bool:
    """Return whether a person leaves `path` (label/name) behind.

    A pattern is of the whole path, of a folder above it or, without a slash, of any name in it.

    >>> leaves("data/sets/a.bin", ["data/sets"]), leaves("project/x/core.1", ["core.*"])
    (True, True)
    """
    for pattern in patterns:
        pattern = pattern.rstrip("/")
        names = [path] if "/" in pattern else path.split("/")
        if any(matches(name, (pattern,)) for name in names) or path.startswith(pattern + "/"):
            return True
    return False


def walk_area(
    root: str, hidden: set[str], exclude: tuple[str, ...], told: dict[str, Any]
) -> list[str]:
    """Return files and links below `root`, sorted, without `hidden` folders.

    What is left out by `exclude`, or is an environment of Python's, and the folders of other jobs
    of perdure's are told.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=complain_to(told["unread"], root)):
        going = []
        for name in sorted(folders):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                names.append(name)
            elif path in hidden:
                if not any(is_below(one, path) for one in told["roots"].values()):
                    told["excluded"].append(path)
            elif is_job(path) and not any(is_below(one, path) for one in hidden):
                told["others"].append(path)
            elif matches(name, exclude) or is_environment(path):
                told["excluded"].append(path)
            else:
                going.append(name)
        folders[:] = going
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and not os.path.isfile(path):
                continue
            if matches(name, exclude):
                told["excluded"].append(path)
            else:
                found.append(path)
    return sorted(found)


SYSTEM = (
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc",
    "/boot",
)
"""Folders in which no script keeps weights."""


def walk_elsewhere(
    roots: dict[str, str], hidden: set[str], wanted: dict[str, Any], told: dict[str, Any]
) -> list[str]:
    """Return what the job may have written where no platform keeps anything, sorted.

    That is what is new in this user's home, but for its hidden files, and wherever the job's own
    arguments and variables point to. What lay there before the job was launched is none of it.
    """
    since_s = find_begin_s(roots, wanted)
    home = locate("~")
    found: set[str] = set()
    for place in sorted({home, *list_named_paths(roots)}):
        if place in ("/", "~") or any(is_below(place, one) for one in (*SYSTEM, *hidden)):
            continue
        exclude = (*wanted["exclude"], ".*") if place == home else tuple(wanted["exclude"])
        aside: dict[str, Any] = {**told, "excluded": []}  # Much of a home is none of the job's.
        # A script may put something behind a name that it is given: `best` becomes `best-1.pth`.
        paths = [] if os.path.isdir(place) else glob.glob(glob.escape(place) + "*")
        for path in [place, *(one for one in paths if not os.path.isdir(one))]:
            inside = walk_area(path, hidden, exclude, aside) if os.path.isdir(path) else [path]
            found |= {one for one in inside if is_newer(one, since_s)}
    return sorted(found)


def find_begin_s(roots: dict[str, str], wanted: dict[str, Any]) -> float:
    """Return since when the job may have written: the age that is told, or that of its own files.

    Clocks here and where it was launched may have been set since; of the two the earlier counts.
    """
    begun: list[float] = [time.time() - wanted.get("age_s", 0.0)]
    with contextlib.suppress(OSError), os.scandir(roots.get("launch", "")) as entries:
        begun += [entry.stat(follow_symlinks=False).st_ctime for entry in entries]
    return min(begun)


def is_newer(path: str, since_s: float) -> bool:
    """Return whether a file was written since then, whatever its times were set to afterwards.

    A link to a folder is new with any file in that.
    """
    try:
        if os.lstat(path).st_ctime >= since_s:
            return True
    except OSError:
        return False
    inside = os.walk(os.path.realpath(path)) if os.path.isdir(path) else ()
    return any(
        is_newer(os.path.join(one, name), since_s) for one, _, names in inside for name in names
    )


def list_named_paths(roots: dict[str, str]) -> set[str]:
    """Return the absolute paths in the arguments and variables of the jobs in `roots`.

    Of `--out=/mnt/runs` it is what stands behind the `=`, of a list each of its parts.
    """
    found: set[str] = set()
    for root in roots.values():
        try:
            with open(os.path.join(root, "job.json"), encoding="utf-8") as file:
                spec = json.load(file)
            words = [*spec.get("args", ()), *spec.get("env", {}).values()]
        except (OSError, ValueError, AttributeError):
            continue
        for word in words:
            for part in str(word).replace("=", ":").replace(",", ":").split(":"):
                path = os.path.expanduser(os.path.expandvars(part.strip()))
                if path.startswith("/") and not path.startswith("//"):
                    found.add(os.path.normpath(path))
    return found


def list_jobs(home: str, roots: list[str]) -> list[str]:
    """Return the folders of jobs below a PERDURE_HOME, but for those among `roots`."""
    folder = os.path.join(locate(home), "jobs") if home else ""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names]
    return [path for path in paths if is_job(path) and path not in roots]


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or inside of it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_environment(path: str) -> bool:
    """Return whether a folder is an environment of Python's, which can be made again."""
    marks = ("pyvenv.cfg", "conda-meta")
    return any(os.path.exists(os.path.join(path, mark)) for mark in marks)


def is_job(path: str) -> bool:
    """Return whether a folder is that of a job of perdure's: as launched, or as it runs."""
    marks = (("launch/settings.json", "launch/box.py"), ("job.json", "journal.jsonl"))
    return any(all(os.path.exists(os.path.join(path, name)) for name in mark) for mark in marks)


def walk(root: str, skip: tuple[str, ...], unread: list[str] | None = None) -> list[str]:
    """Return the files below `root`, sorted; sockets and pipes are left out.

    Folders that cannot be read are added to `unread`; a `root` that is not there is empty.
    """
    found = []
    complain = None if unread is None else complain_to(unread, root)
    for folder, folders, names in os.walk(root, onerror=complain):
        folders[:] = sorted(name for name in folders if not matches(name, skip))
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*linked, *names]:
            path = os.path.join(folder, name)
            if not matches(name, skip) and (os.path.islink(path) or os.path.isfile(path)):
                found.append(path)
    return sorted(found)


def complain_to(unread: list[str], root: str) -> Callable[[OSError], None]:
    """Return what adds a folder that cannot be read; a `root` that is not there is none."""

    def complain(error: OSError) -> None:
        if error.filename != root or os.path.exists(root):
            unread.append(f"{error.filename}: {error.strerror}")

    return complain


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name is one of `patterns`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def hash_file(path: str) -> tuple[int, str]:
    """Return size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def digest_package(folder: str) -> str:
    """Return one digest of the sources of a package: the same for the same installation."""
    digest = hashlib.sha256()
    for path in walk(locate(folder), ("__pycache__", "prebuilt")):
        if not path.endswith((".pyc", ".so")):
            digest.update(os.path.relpath(path, folder).encode() + b"\0")
            digest.update(hash_file(path)[1].encode())
    return digest.hexdigest()


def failpoint(name: str, about: str = "") -> None:
    """Have the fault of a test happen here; without its variable nothing is imported."""
    if os.environ.get("PERDURE_FAILPOINTS"):
        from perdure import failpoints

        failpoints.failpoint(name, about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
