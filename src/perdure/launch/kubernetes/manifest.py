"""The manifests of a job: data only, the same for the same job and profile."""

import hashlib
import re
from typing import Any

import msgspec

from perdure.launch.kubernetes.security import secure_container, secure_pod
from perdure.launch.platforms import locate_in_project, render_job
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import (
    FAILURE_POLICY,
    INDEXED,
    JOB_LABEL,
    LEFT_ON_NOTICE,
    POD_UNFIT,
    KubernetesSection,
    parse_version,
)
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.platforms.profile import HOST_DEPENDENT, Profile

CONTAINER = "perdure"
CONTAINERS = {"trainjob": "node", "pytorchjob": "pytorch"}
"""Shape -> what its controller wants the container to be called; any other: `perdure`."""
ADDED_LABEL = "perdure.dev/added"
"""Of a Job with one pod that was added while its job ran."""
READER_LABEL = "perdure.dev/reader"
"""Of a pod that only has a job's volume, and must not be taken for one of the job's."""
READER_S = 86400
CONFIG_DIR = "/etc/perdure"
PROJECT = "project"
"""Folder of a project that is sent; packed, `project.tar.gz` in the ConfigMap."""
AGAIN = (3, POD_UNFIT, 137)
"""Exit codes after which another pod is worth trying: a platform's fault, a pod without its GPUs,
a kill. Any other is what `perdure run` leaves with after restarts of its own."""
Document = dict[str, Any]


def name_objects(spec: JobSpec) -> str:
    """Return what the objects of a job are called: a label that a Service takes as well.

    A name that had to be changed gets a mark of the whole name, so that two jobs stay two.

    >>> name_objects(JobSpec(name="gpt", script="t.py"))
    'gpt'
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", spec.name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"job-{plain}".strip("-")
    if plain == spec.name and len(plain) <= 48:
        return plain
    mark = hashlib.sha256(spec.name.encode()).hexdigest()[:6]
    return f"{plain[:41].rstrip('-')}-{mark}"


def name_claim(spec: JobSpec, section: KubernetesSection) -> str:
    """Return the name of the claim that holds DURABLE_DIR."""
    return section.claim or f"{name_objects(spec)}-durable"


def choose_mount_mode(spec: JobSpec, section: KubernetesSection) -> str:
    """Return how the claim is to be mounted."""
    if section.access_mode != "auto":
        return section.access_mode
    return "ReadWriteMany" if spec.num_nodes > 1 else "ReadWriteOnce"


def place_spec(spec: JobSpec, profile: Profile) -> JobSpec:
    """Return the job as its pods see it: paths in the image, other nodes in pods of their own."""
    inside = locate_in_project(spec, spec.cwd, "cwd")
    project = locate_project(spec, profile)
    cwd = project if inside == "." else f"{project}/{inside}"
    placed = msgspec.structs.replace(spec, cwd=cwd, tee="all", remote=spec.num_nodes - 1)
    if spec.num_nodes > 1 and not spec.checkpoint.url:
        url = f"{profile.overrides.DURABLE_DIR}/checkpoints/{spec.name}"
        placed = msgspec.structs.replace(
            placed, checkpoint=msgspec.structs.replace(spec.checkpoint, url=url)
        )
    return placed


def locate_job_folder(spec: JobSpec, profile: Profile) -> str:
    """Return the job's own folder on the volume."""
    return f"{profile.overrides.DURABLE_DIR}/launched/{spec.name}"


def locate_project(spec: JobSpec, profile: Profile) -> str:
    """Return where a pod has the project: in the image, or on the volume where it is sent."""
    return profile.kubernetes.project or f"{locate_job_folder(spec, profile)}/{PROJECT}"


def make_claim(spec: JobSpec, profile: Profile) -> Document:
    """Return the claim; a file of its own, so that deleting the job's file leaves it."""
    section = profile.kubernetes
    body = {
        "accessModes": [choose_mount_mode(spec, section)],
        "resources": {"requests": {"storage": section.storage}},
        **_fill(storageClassName=section.storage_class),
    }
    return {
        **_head("v1", "PersistentVolumeClaim", name_claim(spec, section), spec, section),
        "spec": body,
    }


def make_documents(spec: JobSpec, profile: Profile) -> list[Document]:
    """Return what is created for a job, its claim left out.

    Raises:
        ConfigError: the profile lacks what there is no default for.
    """
    section = profile.kubernetes
    if not section.image:
        raise ConfigError(
            "kubernetes.image is not set: code comes to a pod in its image",
            hint="perdure launch --write-image writes a Dockerfile; "
            'kubernetes.image = "registry/name@sha256:..." in a profile of your own',
        )
    if spec.launch.secrets and not section.secret:
        raise ConfigError(
            "launch.secrets reach a pod by reference, and kubernetes.secret names no Secret",
            hint="kubectl create secret generic NAME --from-literal=KEY=...",
        )
    name = name_objects(spec)
    config = {
        **_head("v1", "ConfigMap", name, spec, section),
        "data": {"job.json": render_job(place_spec(spec, profile))},
    }
    service = {
        **_head("v1", "Service", name, spec, section),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
        },
    }
    if section.shape == "jobset":
        return [config, _make_jobset(spec, profile)]
    if section.shape == "trainjob":
        return [config, *_make_trainjob(spec, profile)]
    if section.shape == "pytorchjob":
        return [config, _make_pytorchjob(spec, profile)]
    return [config, service, *_make_jobs(spec, profile)]


def _make_jobs(spec: JobSpec, profile: Profile) -> list[Document]:
    """Return one Indexed Job; for an older server, one for the first node and one for the rest.

    There the controller numbers the nodes: each pod of the second Job asks it for a place.
    """
    name, pods = name_objects(spec), spec.first_nodes
    if pods == 1 or parse_version(profile.kubernetes.server) >= INDEXED:
        return [_make_job(spec, profile, name, pods)]
    return [
        _make_job(spec, profile, name, 1, role="first"),
        _make_job(spec, profile, f"{name}-nodes", pods - 1, role="node"),
    ]


def _make_job(spec: JobSpec, profile: Profile, name: str, pods: int, *, role: str = "") -> Document:
    head = _head("batch/v1", "Job", name, spec, profile.kubernetes)
    return {**head, "spec": make_job_spec(spec, profile, pods, role=role)}


def list_added_jobs(spec: JobSpec, pods: int) -> list[str]:
    """Return the names of the Jobs that a job of `pods` pods has beside its first ones."""
    return [f"{name_objects(spec)}-node-{number}" for number in range(spec.first_nodes, pods)]


def make_added(spec: JobSpec, profile: Profile, name: str) -> Document:
    """Return the Job of one more pod, which joins as `perdure node join` does.

    It has a Job of its own: what a Job completes is fixed before 1.27, and which of its pods it
    ends, where it is to have fewer, nobody can say.
    """
    job = _make_job(spec, profile, name, 1, role="node")
    job["metadata"]["labels"][ADDED_LABEL] = "true"
    return job


def _make_jobset(spec: JobSpec, profile: Profile) -> Document:
    section = profile.kubernetes
    labels = {**section.labels, JOB_LABEL: name_objects(spec)}
    job = {"metadata": {"labels": labels}, "spec": make_job_spec(spec, profile, spec.first_nodes)}
    body = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
    }
    return {
        **_head("jobset.x-k8s.io/v1alpha2", "JobSet", name_objects(spec), spec, section),
        "spec": body,
    }


def _make_trainjob(spec: JobSpec, profile: Profile) -> list[Document]:
    """Return a runtime of the job's own and a TrainJob on it.

    All of the pod is in the runtime: how a TrainJob overrides volumes has changed with each
    release of the Trainer.
    """
    section, name, api = profile.kubernetes, name_objects(spec), "trainer.kubeflow.org/v1alpha1"
    labels = {**section.labels, JOB_LABEL: name}
    labels["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    job: Document = {
        "metadata": {"labels": labels},
        "spec": make_job_spec(spec, profile, spec.first_nodes, container=CONTAINERS["trainjob"]),
    }
    template = {"spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": job}]}}
    runtime = {
        **_head(api, "TrainingRuntime", name, spec, section),
        "spec": {"mlPolicy": {"numNodes": spec.first_nodes}, "template": template},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    body = {"runtimeRef": reference, "trainer": {"numNodes": spec.first_nodes}}
    return [runtime, {**_head(api, "TrainJob", name, spec, section), "spec": body}]


def _make_pytorchjob(spec: JobSpec, profile: Profile) -> Document:
    """Return a PyTorchJob: the first node is its master, the others are workers.

    The Training Operator has no failure policy. By `ExitCode` it makes a pod again that left with
    128 or more, so after a kill and an end on notice, and ends the job after any other code.
    """
    section, name = profile.kubernetes, name_objects(spec)
    policy = {"Never": "ExitCode", "OnFailure": "OnFailure"}[section.restart_policy]
    several = spec.first_nodes > 1

    def replicate(pods: int, role: str) -> Document:
        pod = _make_pod(spec, profile, role, CONTAINERS["pytorchjob"])
        del pod["restartPolicy"]  # The operator would say that it overwrites it.
        metadata = {"labels": {**section.labels, JOB_LABEL: name}}
        template = {"metadata": metadata, "spec": pod}
        return {"replicas": pods, "restartPolicy": policy, "template": template}

    replicas = {"Master": replicate(1, "first" if several else "")}
    if several:
        replicas["Worker"] = replicate(spec.first_nodes - 1, "node")
    run = {
        "cleanPodPolicy": "None",  # Their logs stay.
        "backoffLimit": section.backoff_limit,
        **_fill(
            activeDeadlineSeconds=section.active_deadline_s, ttlSecondsAfterFinished=section.ttl_s
        ),
    }
    return {
        **_head("kubeflow.org/v1", "PyTorchJob", name, spec, section),
        "spec": {"runPolicy": run, "pytorchReplicaSpecs": replicas},
    }


def make_job_spec(
    spec: JobSpec, profile: Profile, pods: int, *, role: str = "", container: str = CONTAINER
) -> Document:
    """Return the spec of a Job with `pods` pods, in the shape of the profile's server."""
    section, version = profile.kubernetes, parse_version(profile.kubernetes.server)
    explains = version >= FAILURE_POLICY and section.restart_policy == "Never"
    return {
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": section.backoff_limit,
        **_fill(
            completionMode="Indexed" if version >= INDEXED else "",
            activeDeadlineSeconds=section.active_deadline_s,
            ttlSecondsAfterFinished=section.ttl_s,
            podFailurePolicy={"rules": _make_rules(container, version)} if explains else {},
            # The next pod once one is gone, and not already while it saves.
            podReplacementPolicy="Failed" if version >= (1, 29) else "",
        ),
        "template": {
            "metadata": {"labels": {**section.labels, JOB_LABEL: name_objects(spec)}},
            "spec": _make_pod(spec, profile, role, container),
        },
    }


def _fill(**fields: Any) -> Document:
    """Return the fields that say something: what is empty is left to the server."""
    return {name: value for name, value in fields.items() if value or value is False}


def make_reader(record: LaunchRecord, name: str) -> Document:
    """Return a pod that does nothing for a day, with the volume of a job and its environment."""
    profile, section = record.profile, record.profile.kubernetes
    spec = JobSpec(name=record.id, script="")
    pod = _make_pod(spec, profile, "", CONTAINER)
    (container,) = pod["containers"]
    kept = ("durable", *(f"host-{number}" for number in range(len(section.host_paths))))
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] in kept]
    container["command"] = [profile.launch.python, "-c", f"import time; time.sleep({READER_S})"]
    container["resources"] = {"requests": {"cpu": "100m"}}
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] in kept]
    pod |= {
        "activeDeadlineSeconds": READER_S,
        "terminationGracePeriodSeconds": 1,
        "restartPolicy": "Never",
    }
    pod.pop("subdomain", None)
    head = _head("v1", "Pod", name, spec, section)
    head["metadata"]["labels"] = {**section.labels, READER_LABEL: record.id}
    return {**head, "spec": pod}


def _make_rules(container: str, version: tuple[int, int]) -> list[Document]:
    """Return what is no failure (a disruption, an end on notice), and what ends the Job at once."""

    def codes(action: str, operator: str, *values: int) -> Document:
        rule = {
            "action": action,
            "onExitCodes": {
                "containerName": container,
                "operator": operator,
                "values": list(values),
            },
        }
        # Until 1.28 the published schema, and so kubectl, wants the field in every rule.
        return rule if version >= (1, 29) else {**rule, "onPodConditions": []}

    disruption = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        {"action": "Ignore", "onPodConditions": disruption},
        codes("Ignore", "In", LEFT_ON_NOTICE),
        codes("FailJob", "NotIn", *AGAIN),
    ]


def _make_pod(spec: JobSpec, profile: Profile, role: str, container: str) -> Document:
    section, name = profile.kubernetes, name_objects(spec)
    return {
        "restartPolicy": section.restart_policy,
        "terminationGracePeriodSeconds": section.grace_s,
        # JobSet makes a Service of its own.
        **_fill(subdomain=name if section.shape == "job" else ""),
        # The pause process is the first one then, and reaps what the ranks leave behind.
        "shareProcessNamespace": True,
        "containers": [_make_container(spec, profile, role, container)],
        "volumes": [
            {"name": "durable", "persistentVolumeClaim": {"claimName": name_claim(spec, section)}},
            {"name": "config", "configMap": {"name": name}},
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": section.shared_memory},
            },
            *(
                {"name": f"host-{number}", "hostPath": {"path": path, "type": "Directory"}}
                for number, path in enumerate(section.host_paths)
            ),
        ],
        **_fill(
            securityContext=secure_pod(section),
            serviceAccountName=section.service_account,
            automountServiceAccountToken=None if section.service_account else False,
            imagePullSecrets=[{"name": secret} for secret in section.pull_secrets],
            priorityClassName=section.priority_class,
            runtimeClassName=section.runtime_class,
            nodeSelector=dict(section.node_selector),
            tolerations=[{"key": key, "operator": "Exists"} for key in section.tolerations],
        ),
    }


def _make_container(spec: JobSpec, profile: Profile, role: str, container: str) -> Document:
    section, durable = profile.kubernetes, profile.overrides.DURABLE_DIR
    # On the volume: what is downloaded elsewhere counts as the pod's own disk, and evicts it.
    cache = profile.overrides.HF_HOME.replace("$DATA_DIR", profile.overrides.DATA_DIR)
    gpus = str(spec.launch.gpus) if spec.launch.gpus else ""
    mirror = profile.mirror if profile.mirror != HOST_DEPENDENT else ""
    given = {
        "PERDURE_POD_GRACE_S": str(section.grace_s),
        **_fill(PERDURE_POD_ROLE=role, PERDURE_POD_GPUS=gpus),
        "HF_HOME": cache,
        **_fill(HF_ENDPOINT=mirror),
    }
    env: list[Document] = [
        {"name": "PERDURE_DURABLE_DIR", "value": durable},
        {"name": "PERDURE_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PERDURE_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "PERDURE_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": name, "value": value} for name, value in given.items()),
        *(
            {"name": key, "valueFrom": {"secretKeyRef": {"name": section.secret, "key": key}}}
            for key in spec.launch.secrets
        ),
    ]
    return {
        "name": container,
        "image": section.image,
        "command": [profile.launch.python, "-P", "-m", "perdure.launch.kubernetes.pod"],
        "env": env,
        "resources": _make_resources(spec, section),
        **_fill(securityContext=secure_container(section)),
        "volumeMounts": [
            {"name": "durable", "mountPath": durable},
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *(
                {"name": f"host-{number}", "mountPath": path, "readOnly": True}
                for number, path in enumerate(section.host_paths)
            ),
        ],
    }


def _make_resources(spec: JobSpec, section: KubernetesSection) -> Document:
    """Return requests and limits. GPUs and memory are a limit only: the request follows by itself.

    Cores are requested and not limited: a quota would throttle ranks in the middle of a step.
    """
    gpus = str(spec.launch.gpus) if spec.launch.gpus else ""
    limits = {"memory": section.memory, section.gpu_resource: gpus}
    return {
        "requests": {"cpu": section.cpu or str(spec.node_ranks)},
        "limits": {"ephemeral-storage": section.ephemeral_storage, **_fill(**limits)},
    }


def _head(
    api: str, kind: str, name: str, spec: JobSpec, section: KubernetesSection
) -> dict[str, Any]:
    labels = {**section.labels, JOB_LABEL: name_objects(spec)}
    metadata = {"name": name, "labels": labels, **_fill(namespace=section.namespace)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}
