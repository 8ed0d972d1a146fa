"""What became of a job, or of one attempt at it, in perdure's words: the same on every platform."""

from typing import Literal

import msgspec

State = Literal["waiting", "running", "done", "failed", "out of memory", "time limit", "preempted",
                "node failed", "evicted", "put back", "cancelled", "unknown"]  # fmt: skip


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job, or an attempt at it, is, or how it ended; also in `perdure diagnose --json`."""

    state: State
    code: int = 0
    signal: int = 0
    reason: str = ""
    start: str = ""
    """As Slurm writes it, local time of the cluster."""
    end: str = ""
    nodes: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs or waits any more."""
        return self.state not in ("waiting", "running", "unknown")


class PodOutcome(Outcome, frozen=True, kw_only=True):
    """How a pod is by itself and its events, or a Kubernetes Job by its pods."""

    attempt: int = 1
    """The number of an attempt of a Job: pods that failed, and one."""
    pod: str = ""
    """The pod of a Job with index 0, where one runs."""
    trap: str = ""
    """The trap that this is, such as `K8S1`."""
    stuck: bool = False
    """Whether it waits for something that does not come by itself."""

    @property
    def counts(self) -> bool:
        """Whether this is a failure of the job, and no doing of the cluster."""
        return self.state in ("failed", "out of memory", "evicted")
