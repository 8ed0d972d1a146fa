"""What a job needs beside perdure and torch: which of the wheel's extras are installed for it."""

import os
import re
from pathlib import Path

from perdure.model.job import JobSpec

MODULES = {
    "torchft": ("torchft", "grpc"),
    "metrics": ("prometheus_client",),
    "huggingface": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
"""Extra -> modules that it brings."""
_USES = re.compile(
    r"^\s*(?:from\s+perdure\.(\w+)\s+import|import\s+perdure\.(\w+)|from\s+perdure\s+import\s+(\w+))",
    re.MULTILINE,
)


def choose_extras(spec: JobSpec) -> tuple[str, ...]:
    """Return the extras of a job, by its fields and by what its script imports of perdure.

    Only the script itself is read, where it can be; what else a project needs stands in
    `launch.packages` or `launch.requirements`.
    """
    wanted = set()
    if spec.torchft.replicas:
        wanted.add("torchft")
    if spec.metrics.prometheus_port:
        wanted.add("metrics")
    path = Path(os.path.join(spec.launch.project, spec.cwd, spec.script))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        text = ""
    wanted |= {name for found in _USES.findall(text) for name in found if name in MODULES}
    return tuple(sorted(wanted))
