"""Kubernetes' words: what a profile asks for, what the state of a pod or a Job means, its past.

Objects are the JSON of the API, as `kubectl get -o json` prints it. A pod that was deleted is gone
with its status; the events about it stay for an hour.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from perdure.model.errors import ConfigError
from perdure.model.platforms.outcome import PodOutcome, State

Object = Mapping[str, Any]
Label = Annotated[str, Meta(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=63)]
Count = Annotated[int, Meta(ge=0)]

IMAGE_BASE = "python:3.12.11-slim-bookworm"
"""What an image for pods is built on, where nobody says otherwise."""
NO_TORCH = "none"
"""The version of torch of an image whose base has it."""
JOB_LABEL = "perdure.dev/job"
"""Of every object of a job -> its name."""
LEFT_ON_NOTICE = 143
"""Exit code of a pod that was told to go and has saved: it is to come again."""
POD_UNFIT = 75
"""Exit code of a pod that lacks what the job needs: another node may have it."""
INDEXED = (1, 22)
"""Server from which a Job numbers its pods; in 1.21 that is alpha, and a field that is silently
dropped."""
FAILURE_POLICY = (1, 26)
"""Server from which podFailurePolicy is on by default; in 1.25 it is silently dropped."""


class KubernetesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a job asks of a cluster. perdure is in the image."""

    image: str = ""
    """With perdure and torch in it, by digest: `registry/name@sha256:...`."""
    project: str = ""
    """Where the image has the folder that launch.project is here; empty: that is sent along (up to
    0.9 MB, compressed), and lies on the volume."""
    host_paths: tuple[str, ...] = ()
    """Folders that every node has, such as an environment on a shared disk: mounted read-only
    under the same path."""
    server: Annotated[str, Meta(pattern=r"^1\.[0-9]+$")] = "1.31"
    """Version of the API server that the manifest is written for; a launch compares it."""
    context: str = ""
    """Context of kubectl; empty: its current one."""
    namespace: Label = ""
    """Empty: the context's own."""
    shape: Literal["job", "jobset", "trainjob", "pytorchjob"] = "job"
    """An Indexed Job, a JobSet (jobset.x-k8s.io), a TrainJob of Kubeflow's Trainer, or a PyTorchJob
    of the older Training Operator."""
    claim: str = ""
    """PersistentVolumeClaim at DURABLE_DIR; empty: one of the job's own name."""
    storage: str = "50Gi"
    """Size of the claim that is made; empty: it is there already."""
    storage_class: str = ""
    """Empty: the cluster's default."""
    access_mode: Literal["auto", "ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"] = "auto"
    """`auto`: ReadWriteMany for several nodes, else ReadWriteOnce."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the device plugin calls a GPU; launch.gpus of them are a pod's limit."""
    cpu: str = ""
    """Cores of a pod, such as `8`; empty: as many as ranks."""
    memory: str = ""
    """Memory of a pod, such as `64Gi`: beyond it the kernel kills. Empty: no limit."""
    ephemeral_storage: str = "20Gi"
    """Limit of what a pod writes outside its volumes, logs included."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm, which counts as memory; the default of container runtimes is 64 MB."""
    grace_s: Annotated[int, Meta(ge=1)] = 120
    """Between SIGTERM and SIGKILL: a step and a checkpoint must fit in."""
    checkpoint_s: Count = 30
    """Seconds that one checkpoint takes; `grace_s` has to be longer."""
    restart_policy: Literal["Never", "OnFailure"] = "Never"
    """`Never`: a fresh pod for each attempt, whose causes can be told apart. `OnFailure`: the
    container starts again in place, and every end counts as a failure."""
    backoff_limit: Count = 6
    """So many failures of pods, preemptions not among them, end the Job."""
    active_deadline_s: Count = 0
    """Walltime of the whole Job; its pods and their logs are deleted then. 0: none."""
    start_deadline_s: Annotated[int, Meta(ge=1)] = 900
    """A pod that has not started for so long is told as stuck: Kubernetes itself waits for ever."""
    ttl_s: Count = 0
    """So long after its end the Job is deleted; 0: it stays."""
    secret: str = ""
    """Secret with the values of launch.secrets, a key for each name."""
    pull_secrets: tuple[str, ...] = ()
    """Secrets for a private registry."""
    service_account: str = ""
    """One that may get nodes has perdure know of a node that is taken away before its pods are told
    to go. Empty: the namespace's default, whose token is not mounted."""
    priority_class: str = ""
    """Who may preempt whom."""
    runtime_class: str = ""
    """Such as `nvidia`, where that is not the default runtime."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have."""
    tolerations: tuple[str, ...] = ("nvidia.com/gpu",)
    """Keys of taints that a pod may stand on, such as those of GPU or spot nodes."""
    labels: dict[str, str] = {}
    """On every object, such as a queue of Kueue."""
    security: Literal["restricted", "image"] = "restricted"
    """`restricted`: what a namespace with the Pod Security Standard of this name admits: not root,
    no capabilities, the runtime's seccomp profile. `image`: nothing is asked for."""
    run_as_user: Count = 1000
    """User id of a restricted pod; 0: the image's own, or the one that the cluster chooses, as
    OpenShift does."""
    fs_group: Count = 1000
    """Group that may write the volume; 0: its rights are left as they are."""
    ptrace: bool = False
    """SYS_PTRACE, for stacks where the node's Yama asks for it (doctor says so). It serves root
    only, so the image's own user runs, and `restricted` refuses the pod."""
    net_admin: bool = False
    """NET_ADMIN, for failures that are made by `tc` in a pod's own network (docs/c4d.md). It serves
    root only, so the image's own user runs, and `restricted` refuses the pod."""


class Right(msgspec.Struct, frozen=True):
    """What a service account may do with one kind of object."""

    resource: str
    verbs: tuple[str, ...]


POD_RIGHTS = (Right("pods", ("get", "list")), Right("events", ("list",)))
"""What the pods of a job ask of their namespace: what becomes of them, and why."""
NODE_RIGHTS = (Right("nodes", ("get",)),)
"""What they ask of the cluster: the taints of their own nodes."""


def parse_version(text: str) -> tuple[int, int]:
    """Return major and minor of `v1.20.2`, `1.31` or `1.27+`.

    Raises:
        ConfigError: it is none.

    >>> parse_version("v1.20.2-gke.100")
    (1, 20)
    """
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigError(f"{text!r} is no version of a server", hint="such as 1.31")
    return int(match[1]), int(match[2])


_STUCK: dict[str, tuple[str, str]] = {
    "ImagePullBackOff": ("K8S3", "the image cannot be pulled"),
    "ErrImagePull": ("K8S3", "the image cannot be pulled"),
    "ErrImageNeverPull": ("K8S3", "the image is not on the node, and must not be pulled"),
    "InvalidImageName": ("K8S3", "the image's name is none"),
    "CreateContainerConfigError": (
        "",
        "a Secret or ConfigMap, or a key in it, is missing, or "
        "the image runs as root (kubernetes.run_as_user)",
    ),
    "CreateContainerError": ("", "the container cannot be made"),
    "RunContainerError": ("", "the container cannot be started"),
    "CrashLoopBackOff": ("", "it ends again and again, and is started ever later"),
}
"""Reason for which a container waits -> trap, in words."""

_POD_REASONS: dict[str, State] = {
    "Evicted": "evicted", "NodeLost": "node failed", "DeadlineExceeded": "time limit",
    "Preempting": "preempted", "Preempted": "preempted", "Shutdown": "preempted",
    "NodeShutdown": "preempted", "Terminated": "preempted", "NodeAffinity": "node failed",
    "UnexpectedAdmissionError": "node failed",
}  # fmt: skip
"""`status.reason` of a pod that failed: set where the container itself may not be told of."""

_DISRUPTIONS: dict[str, State] = {
    "PreemptionByScheduler": "preempted",
    "EvictionByEvictionAPI": "preempted",
    "TerminationByKubelet": "evicted",
    "DeletionByTaintManager": "node failed",
    "DeletionByPodGC": "node failed",
}
"""Reason of the condition DisruptionTarget. The eviction API is `kubectl drain`, and an
autoscaler that takes a node away; the kubelet's own is pressure on the node."""

_EVENTS: tuple[tuple[str, str, str], ...] = (
    (r"Multi-Attach", "K8S4", "the volume is attached to another node"),
    (r"persistentvolumeclaim .* not found", "", "the claim does not exist"),
    (r"unbound immediate PersistentVolumeClaims", "", "the claim is bound to no volume"),
    (r"Insufficient \S*(gpu|amd\.com|habana)", "K8S1", "no node has a GPU to give"),
    (r"(secret|configmap) .* not found", "", "a Secret or ConfigMap does not exist"),
    (r"(had untolerated taint|that the pod didn't tolerate)", "K8S1", "a taint keeps it off"),
    (r"pull.* image|ErrImagePull", "K8S3", "the image cannot be pulled"),
    (r"Insufficient (cpu|memory|ephemeral-storage)", "", "no node has the room"),
    (r"FailedMount|FailedAttachVolume", "", "a volume cannot be mounted"),
)
"""Words of a scheduler or kubelet -> trap, in words; the first that is found counts."""


def explain_pod(pod: Object, events: Sequence[str] = ()) -> PodOutcome:
    """Return how a pod is; `events` are messages about it, the newest last.

    An evicted pod often has no container status at all, so what the pod itself says comes first.
    """
    status = pod.get("status", {})
    phase, reason = status.get("phase", ""), status.get("reason", "")
    code, ended = _choose_worst_end(status)
    message = status.get("message", "")
    if phase == "Succeeded":
        return PodOutcome(state="done", reason="every container left with 0")
    if reason in _POD_REASONS or reason.startswith("OutOf"):
        state = _POD_REASONS.get(reason, "node failed")
        local = state == "evicted" and "ephemeral" in message
        return PodOutcome(
            state=state, code=code, reason=_join(reason, message), trap="K8S5" if local else ""
        )
    target = _find_condition(status, "DisruptionTarget")
    if target.get("status") == "True" and (why := target.get("reason", "")) in _DISRUPTIONS:
        return PodOutcome(
            state=_DISRUPTIONS[why], code=code, reason=_join(why, target.get("message", ""))
        )
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return PodOutcome(state="cancelled", code=code, reason="deleted; the Job makes another")
    if phase == "Failed":
        return _explain_end(code, ended, message)
    if phase == "Running":
        for one in status.get("containerStatuses", ()):
            waiting = one.get("state", {}).get("waiting", {})
            if waiting.get("reason") in _STUCK:
                return _explain_waiting(waiting)
        return PodOutcome(state="running")
    return _explain_pending(status, events)


def _explain_end(code: int, ended: str, message: str) -> PodOutcome:
    match ended:
        case "OOMKilled":
            return PodOutcome(state="out of memory", code=code or 137, reason=ended, trap="U9")
        case "DeadlineExceeded":
            return PodOutcome(state="time limit", code=code, reason=ended)
        case "ContainerCannotRun" | "StartError":
            return PodOutcome(state="failed", code=code, reason=_join(ended, message))
    if code == LEFT_ON_NOTICE:
        return PodOutcome(state="preempted", code=code, reason="left on SIGTERM, its state saved")
    killed = f" (signal {code - 128})" if 128 < code < 193 else ""
    return PodOutcome(state="failed", code=code or 1, reason=f"{ended or 'Error'} {code}{killed}")


def _explain_pending(status: Object, events: Sequence[str]) -> PodOutcome:
    for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = one.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _STUCK:
            return _explain_waiting(waiting)
    scheduled = _find_condition(status, "PodScheduled")
    said = [*events, scheduled.get("message", "")] if scheduled.get("status") == "False" else events
    for line in reversed(said):
        for pattern, trap, words in _EVENTS:
            if re.search(pattern, line, re.IGNORECASE):
                return PodOutcome(state="waiting", reason=_join(words, line), trap=trap, stuck=True)
    return PodOutcome(state="waiting", reason=next((line for line in reversed(said) if line), ""))


def _explain_waiting(waiting: Object) -> PodOutcome:
    trap, words = _STUCK[waiting["reason"]]
    return PodOutcome(
        state="waiting",
        reason=_join(f"{waiting['reason']}: {words}", waiting.get("message", "")),
        trap=trap,
        stuck=True,
    )


def _choose_worst_end(status: Object) -> tuple[int, str]:
    """Return exit code and reason of the container that ended worst, now or in its last life."""
    found = [(0, "")]
    for one in status.get("containerStatuses", ()):
        for life in ("state", "lastState"):
            ended = one.get(life, {}).get("terminated")
            if ended:
                found.append((int(ended.get("exitCode", 0)), ended.get("reason", "")))
                break
    return max(found, key=lambda pair: (pair[1] == "OOMKilled", pair[0]))


def _find_condition(status: Object, kind: str) -> Object:
    rows: Sequence[Object] = status.get("conditions", ())
    return next((row for row in rows if row.get("type") == kind), {})


def _join(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason


def read_pod_index(pod: Object) -> int:
    """Return the number of a pod in its job; 0 where nothing numbers it.

    Of a PyTorchJob the master is 0, and its workers follow.
    """
    found = pod.get("metadata", {}).get("annotations", {})
    labels = pod.get("metadata", {}).get("labels", {})
    worker = labels.get("training.kubeflow.org/replica-type") == "worker"
    number = labels.get("training.kubeflow.org/replica-index", "0")
    return int(found.get("batch.kubernetes.io/job-completion-index", number)) + int(worker)


def read_pytorchjob(found: Object) -> Object:
    """Return a PyTorchJob as the Job that would stand for it."""
    spec, status = found.get("spec", {}), found.get("status", {})
    counts = status.get("replicaStatuses", {}).values()
    rows = status.get("conditions", ())
    return {
        "metadata": found.get("metadata", {}),
        "spec": {
            "parallelism": sum(
                int(one.get("replicas", 1)) for one in spec.get("pytorchReplicaSpecs", {}).values()
            ),
            "suspend": spec.get("runPolicy", {}).get("suspend", False),
        },
        "status": {
            "conditions": [
                {**row, "type": "Complete" if row.get("type") == "Succeeded" else row.get("type")}
                for row in rows
            ],
            **{
                name: sum(int(one.get(name) or 0) for one in counts)
                for name in ("failed", "succeeded")
            },
        },
    }


def explain_job(
    job: Object | None, pods: Sequence[Object], events: Mapping[str, Sequence[str]]
) -> PodOutcome:
    """Return how a Job is. `events` are messages by the name of the pod.

    A Job that is not there was deleted, by a person or once its time after the end was over;
    one whose parallelism is 0, or that is suspended, was scaled down, and goes on when it is
    scaled up. Of both, what is on the volume is left.
    """
    if job is None:
        return PodOutcome(state="cancelled", reason="the Job was deleted; its volume was not")
    status, spec = job.get("status", {}), job.get("spec", {})
    attempt = int(status.get("failed", 0)) + 1
    ordered = sorted(pods, key=lambda pod: pod.get("metadata", {}).get("creationTimestamp", ""))
    states = [(p, explain_pod(p, events.get(p["metadata"]["name"], ()))) for p in ordered]
    if _find_condition(status, "Complete").get("status") == "True":
        return PodOutcome(state="done", reason="Complete", attempt=attempt)
    failed = _find_condition(status, "Failed")
    if failed.get("status") == "True":
        return _explain_failed(failed, [state for _, state in states], attempt)
    for held, why in (
        (spec.get("suspend"), "suspended: it goes on once suspend is false"),
        (spec.get("parallelism") == 0, "scaled down to no pod; the Job is there"),
    ):
        if held:
            return PodOutcome(state="waiting", reason=why, attempt=attempt)
    # Beside a Job without numbers stands one for the other nodes, whose pods are looked at too.
    own = job.get("metadata", {}).get("name", "")
    mine = [
        (p, s) for p, s in states if p["metadata"].get("labels", {}).get("job-name", own) == own
    ]
    running = [pod for pod, state in mine if state.state == "running"]
    waiting = [state for _, state in states if state.state == "waiting"]
    stuck = [state for state in waiting if state.stuck]
    first = next((pod["metadata"]["name"] for pod in running if read_pod_index(pod) == 0), "")
    wanted = int(spec.get("parallelism", 1))
    if len(running) + int(status.get("succeeded", 0)) >= wanted:
        return PodOutcome(state="running", attempt=attempt, pod=first)
    told = (stuck or waiting or [PodOutcome(state="waiting", reason="no pod yet")])[0]
    reason = f"{len(running)} of {wanted} pods run; {told.reason or 'one is on its way'}"
    return PodOutcome(
        state="running" if first else "waiting",
        reason=reason,
        trap=told.trap,
        attempt=attempt,
        pod=first,
        stuck=told.stuck,
    )


def _explain_failed(condition: Object, states: Sequence[PodOutcome], attempt: int) -> PodOutcome:
    """Return how a Job failed: its last failed pod says why, where there still is one."""
    why = condition.get("reason", "")
    text = _join(why, condition.get("message", ""))
    if why == "DeadlineExceeded":
        return PodOutcome(state="time limit", code=1, reason=text, attempt=attempt)
    last = next(
        (s for s in reversed(states) if s.state not in ("done", "running", "waiting")), None
    )
    if last is None:
        return PodOutcome(
            state="failed",
            code=1,
            reason=_join(text, "its pods are gone; see the logs on the volume"),
            attempt=attempt,
        )
    return PodOutcome(
        state=last.state,
        code=last.code or 1,
        reason=_join(text, last.reason),
        trap=last.trap,
        attempt=attempt,
    )


_OF_PODS = {
    "Killing": "told to go", "Evicted": "evicted", "Preempted": "preempted",
    "TaintManagerEviction": "evicted, its node is tainted", "Failed": "failed",
    "BackOff": "waits longer each time", "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached", "FailedScheduling": "finds no node",
    "NodeNotReady": "its node is not ready", "Unhealthy": "unhealthy",
}  # fmt: skip
_OF_NODES = {
    "NodeNotReady": "not ready", "NodeNotSchedulable": "cordoned", "Rebooted": "rebooted",
    "SystemOOM": "the kernel was out of memory", "EvictionThresholdMet": "short of a resource",
    "NodeHasDiskPressure": "short of disk", "NodeHasInsufficientMemory": "short of memory",
    "RemovingNode": "removed", "DeletingNode": "deleted", "Shutdown": "shuts down",
}  # fmt: skip
"""Reason of an event -> in words. What is not here is no trouble."""


_TAKEN = ("Preempted", "Evicted", "TaintManagerEviction", "NodeNotReady")
"""Reason of an event that says why a pod was deleted, where the pod itself does not."""


class PodLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a pod of a running job."""

    id: str
    """The same whenever the same loss of the same pod is read."""
    pod: str
    reason: str
    ended_s: float = 0.0
    """When its container ended; 0: it has not, as far as is known."""
    asks: bool = False
    """Its events may say why."""
    doubtful: bool = False
    """It is nothing unless they do."""
    first: bool = False
    """It was the job's first pod."""


def list_pod_losses(pods: Sequence[Object], own: str) -> tuple[PodLoss, ...]:
    """Return what has become of pods that ended or are told to go, and of restarted containers.

    `own` is the job's first pod, which looks; an end on its own is none to tell of.
    """
    mine = next((_read_role(pod) for pod in pods if pod["metadata"]["name"] == own), None)
    return tuple(
        msgspec.structs.replace(loss, first=_read_role(pod) == mine)
        for pod in pods
        if (loss := _find_pod_loss(pod, own)) is not None
    )


def _find_pod_loss(pod: Object, own: str) -> PodLoss | None:
    status, name, uid = pod.get("status", {}), pod["metadata"]["name"], pod["metadata"]["uid"]
    state, ended_s = explain_pod(pod), parse_time(_read_container_end(pod))
    if state.state == "running":
        if any(one.get("lastState", {}).get("terminated") for one in _list_containers(pod)):
            state = explain_pod({"status": {**status, "phase": "Failed"}})
        elif name != own and _find_condition(status, "Ready").get("status") == "False":
            return PodLoss(
                id=f"{uid}-unready",
                pod=name,
                reason=f"pod {name}: not ready",
                asks=True,
                doubtful=True,
            )
        else:
            return None
    elif state.state in ("waiting", "done") or name == own:
        return None
    # Whether another one comes is not known here.
    words = "deleted" if state.state == "cancelled" else f"{state.state}: {state.reason}"
    return PodLoss(
        id=f"{uid}-{state.state}-{ended_s:.0f}",
        pod=name,
        reason=f"pod {name}: {words}",
        ended_s=ended_s,
        asks=state.state == "cancelled",
    )


def explain_pod_loss(loss: PodLoss, events: Sequence[Object]) -> PodLoss | None:
    """Return a loss with what the events of its pod add; None where it is none without them."""
    told = [e for e in sorted(events, key=_read_event_time) if e.get("reason") in _TAKEN]
    if told:
        reason, message = told[-1]["reason"], told[-1].get("message", "")
        return msgspec.structs.replace(
            loss, reason=f"pod {loss.pod}: {_OF_PODS[reason]}: {message}".removesuffix(": ")
        )
    return None if loss.doubtful else loss


def parse_time(text: str) -> float:
    """Return a time of the API, such as `2026-11-22T03:45:44Z`, in seconds since 1970; 0 for none.

    >>> parse_time("1970-01-01T00:01:00Z")
    60.0
    """
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _read_role(pod: Object) -> tuple[str, int]:
    """Return which pod of which Job this is: the next one of both takes its place."""
    return str(pod["metadata"].get("labels", {}).get("job-name", "")), read_pod_index(pod)


def _list_containers(pod: Object) -> Sequence[Object]:
    found: Sequence[Object] = pod.get("status", {}).get("containerStatuses", ())
    return found


def tell_past(job: str, pods: Sequence[Object], events: Sequence[Object]) -> tuple[str, ...]:
    """Return what happened to the pods of the Job `job` and to their nodes, the oldest first.

    One line each, with its time (UTC), without what is as it should be.
    """
    own = re.compile(rf"{re.escape(job)}(-nodes?)?(-\d+)?-[a-z0-9]{{5}}")
    nodes = {str(pod.get("spec", {}).get("nodeName", "")) for pod in pods}
    told: list[tuple[str, str]] = []
    for pod in pods:
        state = explain_pod(pod)
        if state.state not in ("running", "waiting", "done", "cancelled"):
            trap = f" [{state.trap}]" if state.trap else ""
            name, at = pod["metadata"]["name"], _read_container_end(pod) or _read_start(pod)
            told.append((at, f"pod {name}: {state.state}{trap}: {state.reason}"))
    for event in events:
        about, reason = event.get("involvedObject", {}), str(event.get("reason", ""))
        kind, name = about.get("kind", ""), str(about.get("name", ""))
        table = _OF_PODS if kind == "Pod" and own.fullmatch(name) else {}
        table = _OF_NODES if kind == "Node" and name in nodes else table
        if reason in table:
            count = int(event.get("count") or 1)
            times = f" ({count} times)" if count > 1 else ""
            text = f"{kind.lower()} {name}: {table[reason]}{times}: {event.get('message', '')}"
            told.append((_read_event_time(event), text))
    return tuple(f"{time[11:19]} {text}" for time, text in sorted(told))


def _read_event_time(event: Object) -> str:
    made = event.get("metadata", {}).get("creationTimestamp")
    return str(event.get("lastTimestamp") or event.get("eventTime") or made or "")


def _read_container_end(pod: Object) -> str:
    """Return when the last of a pod's containers ended, now or in its life before; empty: never."""
    return max(
        (
            str(one[life]["terminated"].get("finishedAt") or "")
            for one in _list_containers(pod)
            for life in ("state", "lastState")
            if one.get(life, {}).get("terminated")
        ),
        default="",
    )


def _read_start(pod: Object) -> str:
    made = pod.get("metadata", {}).get("creationTimestamp", "")
    return str(pod.get("status", {}).get("startTime", made))
