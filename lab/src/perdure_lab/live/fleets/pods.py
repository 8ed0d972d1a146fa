"""The nodes of a job on Kubernetes: each further pod is one.

A pod that is taken has all its processes killed from inside, at once, and is deleted without grace.
The deletion alone (`--grace-period=0 --force`) only takes its name from the server: its processes
are told by SIGTERM, and may go on for as long as the grace. A Job makes the next pod at once; so
that none comes, the Job's parallelism is one less until the node is given back. It is set before
the deletion where this is the Job's last pod, and behind it else, because the Job would choose
which pod to end. Where the next one was made in between, it is the one that the Job ends: of its
pods, those that do not run yet go first. With notice the pod is deleted with the notice as its
grace, as Kubernetes does it.

All of that is what who may edit the namespace may do. The first pod has controller and bus, and
stays.
"""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from perdure.launch.exchange import UnreachedError
from perdure.launch.kubernetes.client import (
    Client,
    PodChannel,
    list_words,
    name_container,
    open_pod,
)
from perdure.launch.platforms import Here
from perdure.model.errors import ConfigError, PerdureError, PlatformError, SafetyError
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import JOB_LABEL, explain_pod
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.report import Snapshot
from perdure_lab.live.fleets.elsewhere import FleetElsewhere, JobElsewhere, at_once, run_aside
from perdure_lab.live.fleets.fleet import Node

_FIRST = "it has the job's controller and bus"
_RIGHTS = (("get", "pods"), ("delete", "pods"), ("create", "pods/exec"), ("get", "jobs"),
           ("patch", "jobs"), ("get", "configmaps"))  # fmt: skip
_HINT = "kubectl get jobs,pods"
_KILL = """\
import os, signal, sys, time
mark, mine = f"PERDURE_POD_NAME={sys.argv[1]}".encode(), {os.getpid(), os.getppid()}
for _ in range(50):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = mark in file.read().split(b"\\0")
            with open(f"/proc/{name}/stat") as file:
                lives = file.read().rpartition(")")[2].split()[0] not in "ZXx"
        except OSError:
            continue
        if marked and lives and int(name) not in mine:
            found.append(int(name))
    for pid in sorted(found):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.01)
"""
"""Run in a container, kills all that was started in it; its first process's end ends us, too."""


class PodFleet(FleetElsewhere):
    """A job on Kubernetes; `launch` starts it, or `record` says where it runs."""

    def __init__(
        self,
        spec: JobSpec,
        client: Client,
        here: Here,
        *,
        record: LaunchRecord | None = None,
        launch: Callable[[], LaunchRecord] | None = None,
    ) -> None:
        """Touch nothing yet."""
        super().__init__(spec, here, record)
        self._client, self._launch = client, launch
        self._pods: dict[int, str] = {}
        """Node -> its pod, as it was last known."""
        self._jobs: dict[int, str] = {}
        """Node -> the Job that makes its pod."""
        self._whole: dict[str, int] = {}
        """Job -> the pods that it had before anything was taken."""
        self._may = False
        """This user may do all that a drive does."""
        self._wanted: dict[str, int] = {}
        self._away: set[int] = set()
        """Nodes for which their Job runs a pod less."""
        self._lock = threading.Lock()

    def list_nodes(self) -> list[Node]:
        """Return a node for each pod, as they are to be or as they are."""
        if self._client.shape != "job":
            raise ConfigError(
                f"pods of a {self._client.shape} are not driven: its controller sets what its Jobs "
                "run",
                hint='kubernetes.shape = "job"',
            )
        if self._record is None:
            names = {n: f"pod {n} of {self.spec.name}" for n in range(self.spec.first_nodes)}
        else:
            if not self._jobs:
                self._find_pods(self._record)
            names = {n: self._pods.get(n, f"pod of {job}") for n, job in self._jobs.items()}
        self._check_rights()
        return [Node(n, name, "" if n else _FIRST) for n, name in sorted(names.items())]

    def _check_rights(self) -> None:
        """Refuse to begin what this user may not go through with; asked once.

        Raises:
            SafetyError: a right is missing.
        """
        if self._may:
            return
        lacking = [
            f"{verb} {what}"
            for verb, what in _RIGHTS
            if self._client.call("auth", "can-i", verb, what)[1].strip() != "yes"
        ]
        if lacking:
            raise SafetyError(
                f"this user may not {', '.join(lacking)} in the job's namespace",
                hint="a role such as `edit`; docs/kubernetes.md lists what a drive needs",
            )
        self._may = True

    def _find_pods(self, record: LaunchRecord) -> None:
        """Find out which pod is which node, by what the job itself says of its hosts.

        Raises:
            ConfigError: the job does not run.
            PlatformError: nobody answers.
        """
        job, pods = self._client.look(record.id)
        if not job.pod:
            raise ConfigError(
                f"job `{record.job}` is {job.state}: {job.reason}",
                hint="perdure launch starts it again; a job file is started by the drive itself",
            )
        channel = self._open(record, job.pod)
        words = ["status", record.job, "--json"]
        told = channel.run(shlex.join(list_words(record, words)), timeout_s=60.0).out
        try:
            devices = msgspec.json.decode(told, type=Snapshot).devices
        except msgspec.MsgspecError as error:
            raise PlatformError(f"pod {job.pod} does not say how the job is") from error
        hosts = {row.host: row.node for row in devices}  # An agent says by which address it is.
        for pod in pods:
            about = pod["metadata"]
            node = hosts.get(pod["status"].get("podIP", ""))
            if node is not None and explain_pod(pod).state == "running":
                self._pods[node] = about["name"]
                self._jobs[node] = about["labels"]["job-name"]

    def _open(self, record: LaunchRecord, pod: str) -> PodChannel:
        container = name_container(record.profile.kubernetes)
        return PodChannel(self._client, pod, container, record.python)

    def start(self) -> None:
        """Launch the job where it is to be, and follow what it tells once all its pods are in."""
        if self._launch is not None:
            self._record = self._launch()
            self._launch = None
        record = self._record
        assert record is not None
        self._wait_pods(record)
        self.know_jobs()
        first = self._open(record, self._pods[0])
        self._job = JobElsewhere(record, first, lambda r, argv: shlex.join(list_words(r, argv)))
        self._job.begin()

    def know_jobs(self) -> None:
        """Know how many pods each Job of the job is to run while nothing is away."""
        jobs = self._client.get_all("jobs", "-l", f"{JOB_LABEL}={self._of().id}")
        self._whole = {
            one["metadata"]["name"]: int(one["spec"].get("parallelism", 1)) for one in jobs
        }
        self._wanted = dict(self._whole)

    def _wait_pods(self, record: LaunchRecord) -> None:
        """Wait until each node of the job has a pod.

        Raises:
            PlatformError: it has not in time.
        """
        deadline = time.monotonic() + record.profile.kubernetes.start_deadline_s
        while True:
            why = f"{len(self._pods)} of {self.spec.first_nodes} nodes have a pod"
            try:
                self._find_pods(record)
            except PerdureError as error:
                why = error.message
            if len(self._pods) >= self.spec.first_nodes:
                return
            if time.monotonic() > deadline:
                raise PlatformError(f"job `{record.job}`: {why}", hint=_HINT)
            time.sleep(1.0)

    def warn(self, nodes: Sequence[int], notice_s: float) -> None:
        """Delete these pods with the notice as their grace; none comes in their place."""
        grace = f"--grace-period={max(1, round(notice_s))}"
        for node in nodes:
            run_aside(
                partial(self._delete, node, grace),
                lambda error: self._here.tell(error.message),
            )

    def take(self, nodes: Sequence[int]) -> None:
        """Kill all that runs in these pods, and delete them; none comes in their place."""
        at_once(self._take_one, nodes)

    def _take_one(self, node: int) -> None:
        pod = self._find_pod(node)
        if pod:
            with contextlib.suppress(UnreachedError):  # Its own end ends who kills.
                self._open(self._of(), pod).run(
                    shlex.join([self._of().python, "-c", _KILL, pod]), timeout_s=20.0
                )
        if self._wanted[self._jobs[node]] == 1:
            self._hold(node, away=True)  # Of several pods the Job would choose which one to end.
        self._delete(node, "--grace-period=0", "--force")
        self._pods.pop(node, None)

    def _delete(self, node: int, *how: str) -> None:
        """Delete a node's pod, and let no other come."""
        if pod := self._find_pod(node):
            words = ("delete", "pod", pod, "--ignore-not-found", "--wait=false", *how)
            self._client.act(*words, hint=_HINT)
        self._hold(node, away=True)

    def _hold(self, node: int, *, away: bool) -> None:
        """Have the Job of a node run a pod less while the node is away, once."""
        with self._lock:
            if (node in self._away) == away:
                return
            name = self._jobs[node]
            wanted = self._wanted[name] + (-1 if away else 1)
            self._set(name, wanted)
            (self._away.add if away else self._away.discard)(node)

    def _set(self, name: str, pods: int) -> None:
        patch = json.dumps({"spec": {"parallelism": pods}})
        self._client.act("patch", "job", name, "-p", patch, hint=_HINT)
        self._wanted[name] = pods

    def _find_pod(self, node: int) -> str:
        """Return a node's pod; of one that has come back, a pod of its Job that is nobody's yet."""
        with self._lock:
            if node in self._pods or node in self._away:
                return self._pods.get(node, "")
            label = f"job-name={self._jobs[node]}"
            for pod in self._client.get_all("pods", "-l", label):
                about, name = pod["metadata"], str(pod["metadata"]["name"])
                gone = "deletionTimestamp" in about or explain_pod(pod).over
                if not gone and name not in self._pods.values():
                    self._pods[node] = name
                    return name
            return ""

    def give(self, nodes: Sequence[int]) -> None:
        """Let the Jobs of these nodes make their pods again."""
        for node in nodes:
            run_aside(partial(self.give_now, node), self._troubles.append)

    def give_now(self, node: int) -> None:
        """Let the Job of a node make its pod again."""
        self._hold(node, away=False)

    def read_entries(self) -> list[JournalEntry]:
        """Return the job's journal; of one that is over, by a pod that reads its volume."""
        if self._job is None:
            return []
        with open_pod(self._of(), self._here) as there:
            return self._job.read_entries(there)

    def end(self, *, stop: bool) -> None:
        """Stop the job, or not; either way its Jobs run as many pods as before."""
        record, job = self._record, self._job
        if record is None:
            return
        if job is None:
            self._here.tell(f"job {record.job} is left as it is: perdure status {record.job}")
        elif stop:
            job.stop(lambda: self._client.look(record.id)[0].over)
        for name, pods in self._whole.items():
            if self._wanted[name] != pods:
                try:
                    self._set(name, pods)
                except PlatformError as error:
                    self._here.tell(
                        f"job {name} runs {self._wanted[name]} pods of {pods}: {error.message}; "
                        f"perdure node scale {record.job} {self.spec.first_nodes} mends it"
                    )


def read_spec(record: LaunchRecord) -> JobSpec:
    """Return the job's document, as its ConfigMap has it.

    Raises:
        ConfigError: there is none.
    """
    config = Client(record.profile.kubernetes).get("configmap", record.id)
    if config is None:
        raise ConfigError(f"job `{record.job}` is not there", hint="kubectl get jobs,configmaps")
    return msgspec.json.decode(config["data"]["job.json"], type=JobSpec)
