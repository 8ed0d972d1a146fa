"""Machines of a notebook service: namespaces of their own, in which Jupyter executes notebooks.

A machine has its own first process, its own /content or /kaggle, an image whose Python has torch
and no perdure, and where asked for no network. When it vanishes, everything on it is killed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.waiting import wait_until

NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
_RUNNER = """\
import sys, nbformat
from nbclient import NotebookClient
source, target = sys.argv[1:]
book = nbformat.read(source, as_version=4)
nbformat.validate(book)
try:
    NotebookClient(book, kernel_name="python3", timeout=None).execute()
finally:
    nbformat.write(book, target)
"""
# As `google.colab.drive`, with real mounts of a file system of its own (an overlay that is all
# upper layer); LOSES is what Drive forgets when it is flushed.
_DRIVE = """\
import os, pathlib, subprocess
def mount(path):
    if os.path.ismount(path):
        return print("Drive already mounted")
    drive, folders = os.environ["DRIVE"], [f"{os.environ['MACHINE']}/{n}" for n in ("low", "work")]
    for folder in (path, *folders):
        os.makedirs(folder, exist_ok=True)
    layers = "lowerdir={},workdir={},upperdir=".format(*folders) + drive
    subprocess.run(["mount", "-t", "overlay", "drive", "-o", layers, path], check=True)
    print("Mounted at", path)
def flush_and_unmount():
    subprocess.run(["umount", "/content/drive"], check=True)
    if pattern := os.environ.get("LOSES"):
        for file in pathlib.Path(os.environ["DRIVE"]).rglob(pattern):
            file.unlink()
"""


def find_lack() -> str:
    """Return why no machine can be made here; empty where one can."""
    if missing := [name for name in ("nbclient", "ipykernel") if find_spec(name) is None]:
        return f"no {missing[0]}: pip install -e '.[dev]'"
    done = subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=30)
    return "no namespaces: not root" if done.returncode else ""


class Machine:
    """One machine below `root`; `place` is what it has at /content or /kaggle."""

    def __init__(self, root: Path, mount: str, *, internet: bool = True, **environ: str) -> None:
        self.root, self.place = root, root / mount.strip("/")
        self.place.mkdir(parents=True)
        self.executed = 0
        venv.create(root / "image", with_pip=False)
        pure = Path(sysconfig.get_path("purelib", vars={"base": str(root / "image")}))
        # A line of a path: what is named in files there, this very perdure, is not on the image.
        (pure / "visible.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        (pure / "google" / "colab").mkdir(parents=True)
        (pure / "google" / "colab" / "drive.py").write_text(_DRIVE)
        (root / "runner.py").write_text(_RUNNER)
        env = {name: value for name, value in os.environ.items() if "PERDURE" not in name}
        # nats-server is beside this Python; on the service, pip installs it beside the image's.
        path = f"{os.environ['PATH']}:{Path(sys.executable).parent}"
        env |= {"HOME": str(root), "MACHINE": str(root), "PATH": path, **environ}
        self.made = not Path(mount).exists()
        Path(mount).mkdir(exist_ok=True)
        self.mount = Path(mount)
        command = [*NAMESPACES, *([] if internet else ["--net"]), "bash", "-e"]
        self.log = root / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, cwd=root,
                start_new_session=True,
            )  # fmt: skip
        if not internet:
            self._type("ip link set lo up")
        self._type(f"mount --bind {self.place} {mount}")

    def _type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def execute(self, notebook: Path) -> Path:
        """Have Jupyter execute a notebook; return where its exit code will be."""
        self.executed += 1
        code, target = self.root / f"code-{self.executed}", f"out-{self.executed}.ipynb"
        python = self.root / "image" / "bin" / "python"
        run = f"{python} runner.py {notebook} {target} && c=0 || c=$?"
        self._type(f"{run}; echo $c > .code; mv .code {code.name}")
        return code

    def wait_until(self, condition: Callable[[], object], code: Path, what: str) -> None:
        """Wait until `condition()` is true while an execution goes on."""
        wait_until(lambda: condition() or code.exists(), what, 240)
        assert condition(), f"ended before {what}: {self.log.read_text()[-4000:]}"

    def wait(self, code: Path, timeout_s: float = 300.0) -> int:
        """Return the exit code of an execution."""
        try:
            wait_until(lambda: code.exists() or self.process.poll() is not None, "end", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log.read_text()[-4000:]}") from None
        assert code.exists(), self.log.read_text()[-4000:]
        return int(code.read_text())

    def find(self, *words: str) -> list[psutil.Process]:
        """Return the machine's processes whose command line has all of `words` in it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                mine = process.environ().get("MACHINE") == str(self.root)
                if mine and process.status() != "zombie" and all(word in line for word in words):
                    found.append(process)
        return found

    def vanish(self) -> None:
        """Kill everything on it at once, as a service takes a machine away."""
        for process in psutil.Process(self.process.pid).children():
            process.kill()  # Its first process: the kernel kills all others.
        self.process.wait(30)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(OSError):
            if self.made:
                self.mount.rmdir()
        shutil.rmtree(self.root / "image", ignore_errors=True)


def find_text(executed: Path) -> str:
    """Return all that the cells of an executed notebook have shown."""
    import nbformat

    book = nbformat.read(executed, as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "".join(o.get("text", "") + "\n".join(o.get("traceback", ())) for o in outputs)
