# ruff: noqa: ASYNC240
"""Ranks on a GPU machine start while the compiler still works on the NCCL plugin."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.agent_driver import Driver, until

pytestmark = pytest.mark.torch

AGENT = """\
import sys
from perdure.service.agent import shell
shell.has_nvidia_gpu = lambda: True
sys.exit(shell.main(sys.argv[1], 0))
"""
COMPILER = """\
#!/bin/sh
echo "$@" >> "$0.called"
while [ ! -e "$0.may_end" ]; do sleep 0.1; done
for word; do target=$word; done
echo library > "$target"
"""
SCRIPT = """\
import os, time
print("plugin", os.environ.get("NCCL_PROFILER_PLUGIN", "none"), flush=True)
time.sleep(86_400)
"""


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    driver = Driver(tmp_path, nproc=1, cold=True)
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    driver.agent_command = [sys.executable, "-P", "-c", AGENT, driver.job]
    driver.env = {
        "PATH": f"{compiler.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    try:
        await driver.start()
        yield driver
    finally:
        await driver.close()


async def read_plugin(driver: Driver, generation: int) -> str:
    """Return what a generation's rank says of its plugin."""
    await driver.form(generation)
    said = Path(driver.paths.stream(generation, 0, "out"))
    await until(lambda: said.exists() and said.read_text().endswith("\n"))
    return said.read_text().split()[1]


async def test_ranks_start_while_the_compiler_works_and_later_ones_use_the_plugin(
    driver: Driver,
) -> None:
    called, cache = driver.folder / "bin" / "cc.called", driver.folder / "cache" / "perdure"
    assert await read_plugin(driver, 0) == "none"
    await until(called.exists)
    assert not list(cache.glob("libnccl*"))
    (driver.folder / "bin" / "cc.may_end").touch()
    await until(lambda: list(cache.glob("libnccl*")))
    generation = 1
    while (plugin := await read_plugin(driver, generation)) == "none":
        generation += 1  # The agent has not seen the builder's end yet.
        await asyncio.sleep(0.1)
    assert plugin == str(next(iter(cache.glob("libnccl*"))))
    assert len(called.read_text().splitlines()) == 1
    assert await driver.end(generation) == 0


async def test_an_agent_that_ends_takes_the_compiler_along(driver: Driver) -> None:
    called, cache = driver.folder / "bin" / "cc.called", driver.folder / "cache" / "perdure"
    assert await read_plugin(driver, 0) == "none"
    await until(called.exists)
    assert await driver.end(0) == 0
    await until(lambda: not driver.leftovers())
    assert list(cache.iterdir()) == []
