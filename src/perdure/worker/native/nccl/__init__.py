"""perdure's NCCL profiler plugin: C source, and how it is built. What it sees: `docs/nccl.md`."""

from perdure.worker.native.nccl.build import (
    PLUGIN_NAME,
    build_nccl_plugin,
    find_nccl_plugin,
)

__all__ = ["PLUGIN_NAME", "build_nccl_plugin", "find_nccl_plugin"]
