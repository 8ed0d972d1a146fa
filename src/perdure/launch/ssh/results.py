"""Files on the box: scripts mended after a push, results listed before a pull. Only Python.

python3 results.py repair FOLDER   line ends and execute bits of scripts
python3 results.py manifest JSON   roster of results with sizes and SHA-256
python3 results.py digest FOLDER   of a package, to see whether it is the same as here
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sys
from typing import Any

ANSWER = "@@perdure-json "
"""Begins the one line of standard output that is the answer: shells may print banners."""


def main(argv: list[str]) -> int:
    """Run one of the commands above; return the exit code."""
    command, argument = argv
    answer: Any
    if command == "repair":
        answer = repair(argument)
    elif command == "manifest":
        answer = make_manifest(json.loads(argument))
    else:
        answer = digest_package(argument)
    print(ANSWER + json.dumps(answer))
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
        if os.path.islink(path):
            continue
        with open(path, "rb") as file:
            head = file.read(2)
        if head != b"#!" and not path.endswith(".sh"):
            continue
        with open(path, "rb") as file:
            data = file.read()
        mode = os.stat(path).st_mode
        if b"\r\n" in data:
            with open(path + ".perdure", "wb") as file:
                file.write(data.replace(b"\r\n", b"\n"))
            os.chmod(path + ".perdure", mode)
            os.rename(path + ".perdure", path)
            ends.append(path)
        if head == b"#!" and not mode & 0o100:
            os.chmod(path, mode | ((mode & 0o444) >> 2))
            bits.append(path)
    return {"line_ends": ends, "execute_bits": bits}


def make_manifest(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the roster of results: label/path, bytes and SHA-256 of each file.

    `wanted`: `roots` (label -> folder), `skip` (patterns of names left out, of files or folders).
    A link is refused: what it points to would not be pulled.
    """
    files: list[dict[str, Any]] = []
    links: list[str] = []
    roots = {label: locate(root) for label, root in wanted["roots"].items()}
    for label, root in sorted(roots.items()):
        for path in walk(root, tuple(wanted["skip"])):
            name = f"{label}/{os.path.relpath(path, root)}"
            if os.path.islink(path):
                links.append(name)
                continue
            size, digest = hash_file(path)
            files.append({"path": name, "bytes": size, "sha256": digest})
    return {"files": files, "links": links, "roots": roots}


def walk(root: str, skip: tuple[str, ...]) -> list[str]:
    """Return the files below `root`, sorted; sockets and pipes are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not matches(name, skip))
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*linked, *names]:
            path = os.path.join(folder, name)
            if not matches(name, skip) and (os.path.islink(path) or os.path.isfile(path)):
                found.append(path)
    return sorted(found)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name is one of `patterns`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def hash_file(path: str) -> tuple[int, str]:
    """Return size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while True:
            chunk = file.read(1 << 20)
            if not chunk:
                return size, digest.hexdigest()
            digest.update(chunk)
            size += len(chunk)


def digest_package(folder: str) -> str:
    """Return one digest of the sources of a package: the same for the same installation."""
    digest = hashlib.sha256()
    for path in walk(locate(folder), ("__pycache__", "prebuilt")):
        if not path.endswith((".pyc", ".so")):
            digest.update(os.path.relpath(path, folder).encode() + b"\0")
            digest.update(hash_file(path)[1].encode())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
