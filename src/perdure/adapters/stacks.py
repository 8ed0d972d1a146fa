"""Python stacks of a process that does not cooperate, by py-spy."""

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

_TIMEOUT_S = 5.0


def find_py_spy() -> str | None:
    """Return the program beside this interpreter, or on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


async def take_stack(pid: int, *, stopped: bool) -> str:
    """Return the stacks of `pid` as text, or one line that says why there are none.

    A stopped process cannot be paused again, so it is read without pausing.
    """
    program = find_py_spy()
    if program is None:
        return "no stack: py-spy is not installed"
    command = [program, "dump", "--pid", str(pid)] + (["--nonblocking"] if stopped else [])
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return f"no stack: py-spy did not answer within {_TIMEOUT_S:g} s"
    if process.returncode != 0:
        lines = err.decode(errors="replace").strip().splitlines() or ["it failed"]
        return f"no stack: {lines[0]}"
    return out.decode(errors="replace")
