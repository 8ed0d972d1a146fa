"""G4: a process that holds most of a GPU's memory is killed, and the next one takes as much.

Passes where the memory is free again within five seconds, to 256 MB, and the next process gets it.
On the CPU it is the memory of the process itself.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import torch

from perdure.keeper.zygote import read_answer
from tests.gpu.kit import Trial
from tests.gpu.memory import Gpu

FREE_S = 5.0
WANTED = 100 << 30
CHUNK = 1 << 30


def run(trial: Trial) -> None:
    if trial.dry:
        measure, size, chunk, spare = measure_process, 64 << 20, 16 << 20, 1 << 20
    else:
        gpu = Gpu()
        measure = lambda pid: gpu.count_used()  # noqa: E731
        size, chunk, spare = min(WANTED, gpu.count_all() * 7 // 10), CHUNK, 256 << 20
    before = measure(0)
    trial.note(held_bytes=size, used_before_bytes=before)
    for _ in trial.tries(trial.choose(10, 2)):
        pid, said = start_holder(trial.device, size, chunk)
        try:
            assert said == "held", f"the next process did not get the memory: {said or 'silence'}"
            assert measure(pid) >= before + size, "the memory that it holds is not seen"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        began_s = time.monotonic()
        while measure(pid) > before + spare:
            assert time.monotonic() < began_s + FREE_S, f"it is not free after {FREE_S:g} s"
            time.sleep(0.005)
        trial.took(time.monotonic() - began_s)


def start_holder(device: str, size: int, chunk: int) -> tuple[int, str]:
    """Fork a process that takes the memory and keeps it; return its pid, and what it said."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            held = [
                torch.ones(chunk, dtype=torch.uint8, device=device) for _ in range(size // chunk)
            ]
            if device != "cpu":
                torch.cuda.synchronize()
            os.write(write, b"held" if held else b"nothing was asked for")
            os.close(write)
            signal.pause()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:1000])
        finally:
            os._exit(1)
    os.close(write)
    said = read_answer(read, 60.0)
    os.close(read)
    return pid, said


def measure_process(pid: int) -> int:
    """Return the bytes of a process that are in memory; 0 once it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
