"""More or fewer pods while a job runs.

Each pod beyond those that a job begins with has a Job of its own, so that it is known which one
goes. A pod that is to go is told to the controller first, by name and with the reason: its ranks
leave at an agreed step, and the journal tells a scale-down from a pod that somebody deleted.
"""

import json
import shlex
from typing import Any

import msgspec
import yaml

from perdure.launch.kubernetes.client import (
    Client,
    PodChannel,
    list_words,
    name_container,
)
from perdure.launch.kubernetes.manifest import ADDED_LABEL, list_added_jobs, make_added
from perdure.launch.platforms import Here
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import JOB_LABEL, explain_pod
from perdure.model.platforms.launching import LaunchRecord, Scaling

SOURCE = "perdure node scale"
_CALL_S = 240.0
"""A command in a pod of a busy node; twice told is once told, but no sooner."""
_HINT = "kubectl get jobs,pods"
_GRACE = 0.8
"""Of a pod's grace: the scale-down is over before its SIGTERM is."""


def scale(record: LaunchRecord, pods: int, here: Here) -> Scaling:
    """Give a running job so many pods; 0 has it save and wait.

    Raises:
        ConfigError: the job does not run there, or has no room for so many.
        SafetyError: the job cannot train with so many, or is not elastic.
        PlatformError: nobody answered.
    """
    scaler = _Scaler(record, here)
    scaler.check(pods)
    before = scaler.count()
    scaler.set_first(0 if pods == 0 else None)
    wanted = set(list_added_jobs(scaler.spec, pods))
    removed = tuple(sorted((name for name in scaler.added if name not in wanted), reverse=True))
    if removed:
        scaler.remove(removed, before, pods)
    added = tuple(sorted(wanted - scaler.added.keys()))
    for name in added:
        scaler.client.create(yaml.safe_dump(make_added(scaler.spec, record.profile, name)))
    return Scaling(job=record.job, pods=pods, before=before, added=added, removed=removed)


class _Status(msgspec.Struct):
    """Of a `Snapshot`, what is asked before pods are added."""

    state: str
    fixed: str | msgspec.UnsetType | None = msgspec.UNSET


def read_fixed(told: str, job: str, pod: str) -> str:
    """Return what keeps the job's world as it is, by its `status --json`; empty where it grows.

    Raises:
        PlatformError: it is no status, it does not say yet, or an older perdure never says it.
    """
    try:
        status = msgspec.json.decode(told, type=_Status)
    except msgspec.MsgspecError as error:
        raise PlatformError(
            f"pod {pod} does not say how the job is: {told[-200:]}", hint="ask again"
        ) from error
    if isinstance(status.fixed, msgspec.UnsetType):
        raise PlatformError(
            f"job `{job}` runs an older perdure, which does not say whether its world grows",
            hint="perdure stop, and launch it with an image of this version: it resumes",
        )
    if status.fixed is None:
        raise PlatformError(
            f"job `{job}` does not train yet: {status.state}",
            hint="ask again: its depth is not known before",
        )
    return status.fixed


class _Scaler:
    """The Jobs of one job."""

    def __init__(self, record: LaunchRecord, here: Here) -> None:
        self.record, self.here = record, here
        self.client = Client(record.profile.kubernetes)
        config = self.client.get("configmap", record.id)
        job, self.pods = self.client.look(record.id)
        if config is None or job.state not in ("waiting", "running"):
            raise ConfigError(
                f"job `{record.job}` is {job.state}: {job.reason}",
                hint="the same `perdure launch` resumes it",
            )
        self.spec = msgspec.json.decode(config["data"]["job.json"], type=JobSpec)
        self.first = job.pod
        jobs = self.client.get_all("jobs", "-l", f"{JOB_LABEL}={record.id}")
        self.jobs: dict[str, Any] = {one["metadata"]["name"]: one for one in jobs}
        self.added = {n: j for n, j in self.jobs.items() if ADDED_LABEL in j["metadata"]["labels"]}

    def count(self) -> int:
        """Return how many pods the job is to have now."""
        return sum(int(job["spec"].get("parallelism", 1)) for job in self.jobs.values())

    def check(self, pods: int) -> None:
        """Refuse what cannot be."""
        first, most = self.spec.first_nodes, self.spec.num_nodes
        name = f"job `{self.record.job}`"
        if 0 < pods < first:
            raise SafetyError(
                f"{name} begins with {first} pods: with {pods} it could not start again",
                hint="nodes = 1 and nodes_max in the job file; 0 pods have it wait",
            )
        if pods > most:
            raise ConfigError(
                f"{name} has room for {most} pods",
                hint=f"nodes_max = {pods} in the job file, at the next launch",
            )
        if pods > first and (fixed := self.ask_fixed()):
            raise SafetyError(
                f"{name} is {fixed}",
                hint="perdure.elastic grows; or perdure stop, and launch it with more nodes: "
                "it resumes",
            )

    def ask_fixed(self) -> str:
        """Return what keeps the job's world as it is, by its own word; empty where it grows."""
        if not self.first:
            raise PlatformError(
                f"no first pod of job `{self.record.job}` runs",
                hint=f"perdure status {self.record.job}",
            )
        told = self.in_first("status", self.record.job, "--json")
        return read_fixed(told, self.record.job, self.first)

    def in_first(self, *argv: str) -> str:
        """Return what a perdure command prints in the first pod."""
        channel = PodChannel(
            self.client,
            self.first,
            name_container(self.record.profile.kubernetes),
            self.record.python,
        )
        return channel.run(shlex.join(list_words(self.record, argv)), timeout_s=_CALL_S).out

    def set_first(self, pods: int | None) -> None:
        """Have the Jobs that the job began with run `pods` pods; None: all of theirs."""
        for name, job in self.jobs.items():
            wanted = int(job["spec"]["completions"]) if pods is None else pods
            if name in self.added or int(job["spec"].get("parallelism", 1)) == wanted:
                continue
            patch = json.dumps({"spec": {"parallelism": wanted}})
            self.client.act("patch", "job", name, "-p", patch, hint=_HINT)

    def remove(self, names: tuple[str, ...], before: int, after: int) -> None:
        """Have the pods of Jobs leave, and delete the Jobs."""
        grace_s = _GRACE * self.record.profile.kubernetes.grace_s
        for pod in self.pods:
            name = pod["metadata"]["name"]
            mine = pod["metadata"].get("labels", {}).get("job-name") in names
            if after and self.first and mine and explain_pod(pod).state == "running":
                self.in_first(
                    "node", "notify", self.record.job, "preemption", "--machine", name,
                    "--grace", f"{grace_s:g}", "--waits", "--source", SOURCE,
                    "--reason", f"from {before} to {after} pods",
                )  # fmt: skip
        self.here.tell(f"{', '.join(names)}: left at an agreed step, and deleted")
        self.client.delete("job", *names, hint=_HINT)
