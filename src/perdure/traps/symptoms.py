"""Words that a dead process leaves, and the trap they speak of.

The words only name a cause for what exits, counters and files have already shown to be a death:
a line that a program prints is never the proof that it died, or that it is done.
"""

import re
from collections.abc import Iterable

from perdure.model.platforms.traps import Symptom

SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("SLURM4", r"slurmstepd: error: Detected \d+ oom[-_]kill",
            "Slurm's memory limit killed"),
    Symptom("U7", r"No space left on device.*(inode|mkdir|mkstemp)", "no inode was left"),
    Symptom(
        "U6",
        r"No space left on device|iostream error|unexpected pos \d+|Disk quota exceeded|"
        r"failed finding central directory",
        "a disk was full, or its quota, or a checkpoint was cut short by one",
    ),
    Symptom(
        "U9",
        r"DataLoader worker.*killed by signal: Killed|oom[-_]kill|Out of memory: Killed process",
        "the kernel killed for want of memory",
    ),
    Symptom(
        "U9",
        r"DataLoader worker.*Bus error|unable to (open|mmap|write to) .*shared memory|"
        r"No space left on device.*/dev/shm",
        "shared memory was too small for loader workers",
    ),
    Symptom("U10", r"CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|HIP out of memory",
            "the GPU's memory was full"),
    Symptom("GEN4", r"\$?'?\\r'?: command not found|bad interpreter.*\^M|/usr/bin/env: .*\\r",
            "a script's lines end as on Windows"),
    Symptom(
        "U28",
        r"no kernel image is available|driver version is insufficient|"
        r"CUDA driver is too old|PTX .*unsupported toolchain|forward compatibility was attempted",
        "torch, its CUDA and the driver do not fit together",
    ),
    Symptom("U31", r"Found no NVIDIA driver|No CUDA GPUs are available|"
            r"not compiled with CUDA enabled|no CUDA-capable device",
            "no GPU was visible"),
    Symptom("U44", r"freeze_support\(\)|An attempt has been made to start a new process before",
            "the script starts processes without a __main__ guard"),
    Symptom("U46", r"Duplicate GPU detected", "two ranks were on one GPU, which NCCL refuses"),
    Symptom("MN1", r"CUDA_ERROR_SYSTEM_NOT_READY|system not yet initialized|fabric ?manager",
            "the fabric manager does not run"),
    Symptom("MN3", r"Watchdog caught collective operation timeout|"
            r"Timed out waiting \d+ms for (recv|send)|wait timeout after \d+ms",
            "a collective ran into its time-out: a peer was dead or late"),
    Symptom("SLURM2", r"slurmstepd: .*CANCELLED AT .*DUE TO TIME LIMIT", "the walltime was over"),
    Symptom("K8S5", r"ephemeral[- ](local )?storage usage exceeds|low on resource: ephemeral",
            "the pod was evicted for its local disk"),
    Symptom("GEN10", r"Too many open files", "there were too few descriptors"),
)  # fmt: skip
_COMPILED = tuple((symptom, re.compile(symptom.pattern, re.IGNORECASE)) for symptom in SYMPTOMS)


def name_symptoms(lines: Iterable[str]) -> tuple[tuple[Symptom, str], ...]:
    """Return each trap that the lines speak of, once, with the newest line that does.

    >>> [(s.trap, line) for s, line in name_symptoms(["x", "RuntimeError: CUDA out of memory."])]
    [('U10', 'RuntimeError: CUDA out of memory.')]
    """
    found: dict[str, tuple[Symptom, str]] = {}
    for line in lines:
        for symptom, pattern in _COMPILED:
            if pattern.search(line):
                found[symptom.trap] = (symptom, line.strip())
                break
    return tuple(found.values())
