"""A warm rank counts CPUs and threads as a fresh Python, and not as its image."""

import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.waiting import PATIENCE_S

from perdure.keeper.bootstrap import unbind

THREADS = """
import json, os, sys
from types import SimpleNamespace
import torch
from perdure.keeper.bootstrap import set_threads
names = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
counts = {name: os.environ.get(name, "") for name in names}
all_cpus = os.sched_getaffinity(0)
store = SimpleNamespace(cpus=all_cpus, counts=counts)
found = [torch.get_num_threads()]
for one_cpu, environ in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        cpus = {min(all_cpus)} if one_cpu else all_cpus
        os.sched_setaffinity(0, cpus)
        set_threads(environ, store, cpus)
        os.write(write, str(torch.get_num_threads()).encode())
        os._exit(0)
    os.wait()
    found.append(int(os.read(read, 9)))
print(found)
"""
MAIN = """
import sys
held, script = sys.argv, sys.argv[1]
from perdure.keeper.bootstrap import run_main
sys.modules["held"] = held
run_main(script, ("a", "b"), module=False, traceback_file="")
"""
SCRIPT = """
import sys
print(__file__, sys.argv, sys.path[0], type(__loader__).__name__, __cached__)
"""


@pytest.mark.parametrize("script", ["./train.py", "link/../train.py", "train.pyc"])
def test_a_script_s_path_is_as_python_has_it(tmp_path: Path, script: str) -> None:
    """`link/..` is the folder above the one that the link leads to."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    for folder in (tmp_path, tmp_path / "real"):
        (folder / "train.py").write_text(SCRIPT)
    py_compile.compile(str(tmp_path / "train.py"), cfile=str(tmp_path / "train.pyc"))

    def start(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    assert start("-c", MAIN, script) == start(script, "a", "b")


def test_modules_of_the_image_have_the_script_s_arguments(tmp_path: Path) -> None:
    """As `ARGV = sys.argv` at the top of a library."""
    script = tmp_path / "train.py"
    script.write_text("import held, sys\nassert held is sys.argv and held[1:] == ['a', 'b']")
    command = [sys.executable, "-c", MAIN, str(script)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.torch
def test_the_script_s_cpus_and_variables_give_the_number_of_threads() -> None:
    """As `import torch` takes it from MKL_NUM_THREADS, OMP_NUM_THREADS, and the CPUs."""
    none: dict[str, str] = {}
    cases = [
        (False, none), (True, none), (False, {"MKL_NUM_THREADS": "1"}),
        (False, {"OMP_NUM_THREADS": "1,4"}), (True, {"OMP_NUM_THREADS": "0"}),
    ]  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", THREADS, json.dumps(cases)],
        env=environ,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    image, *found = json.loads(done.stdout)
    assert found == [image, 1, 1, 1, 1]


def test_a_rank_leaves_the_cpus_of_its_image_that_an_import_has_not_changed() -> None:
    """A cgroup may take all CPUs of the image's start away: the rank goes on with others."""
    cpus = os.sched_getaffinity(0)
    gone, other = {1023}, cpus | {1022}
    try:
        os.sched_setaffinity(0, {min(cpus)})
        bound = os.sched_getaffinity(0)
        assert unbind(SimpleNamespace(cpus=cpus, bound=other)) is None  # type: ignore[arg-type]
        assert unbind(SimpleNamespace(cpus=gone, bound=bound)) is None  # type: ignore[arg-type]
        assert os.sched_getaffinity(0) == bound
        freed = unbind(SimpleNamespace(cpus=cpus, bound=bound))  # type: ignore[arg-type]
        assert (freed or cpus, os.sched_getaffinity(0)) == (bound, cpus)
    finally:
        os.sched_setaffinity(0, cpus)
