"""What a cluster would refuse of a profile's fields, and what costs a training job its work.

Whether the manifests are right, the server itself says (`--dry-run=server`) before a launch. What
it cannot say, and what `perdure launch --dry-run` has to say without a server, is here. A finding
is an `error` if the server refuses the object, or if the job cannot train. It is a `warning` if the
job may lose work.
"""

import re
from collections.abc import Iterable, Iterator

from perdure.launch.kubernetes.manifest import choose_mount_mode
from perdure.launch.kubernetes.security import explain_security
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import FAILURE_POLICY, KubernetesSection, parse_version
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.traps.findings import error, note, warning

_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE]\d+)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}\w)?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_NAMES = ("claim", "storage_class", "secret", "service_account", "priority_class", "runtime_class")
_SIZES = ("storage", "cpu", "memory", "ephemeral_storage", "shared_memory")


def check_fields(spec: JobSpec, section: KubernetesSection) -> list[Finding]:
    """Return the fields that no server takes, each with its name."""
    return [
        *(
            one
            for field in _SIZES
            if (value := getattr(section, field))
            for one in _refuse(field, value, _QUANTITY, "no quantity", "such as 500m, 16Gi")
        ),
        *(
            one
            for field, value in _list_names(section)
            for one in _refuse(field, value, _NAME, "no name: lower-case letters, digits, - and .")
        ),
        *(
            one
            for field in ("node_selector", "labels")
            for key, value in getattr(section, field).items()
            for one in (
                *_refuse(field, key, _LABEL_KEY, "no key of a label"),
                *_refuse(field, value, _LABEL_VALUE, "no value of a label"),
            )
        ),
        *(
            one
            for key in section.tolerations
            for one in _refuse("tolerations", key, _LABEL_KEY, "no key of a taint")
        ),
        *(
            one
            for name in spec.env
            for one in error(not _VARIABLE.fullmatch(name), f"env: {name!r} is no name", "A_B")
        ),
        *error(
            spec.launch.gpus and "/" not in section.gpu_resource,
            f"kubernetes.gpu_resource: {section.gpu_resource!r} has no domain",
            "nvidia.com/gpu",
        ),
        *error(
            section.image != section.image.strip() or " " in section.image,
            f"kubernetes.image: {section.image!r} has spaces",
            "registry/name@sha256:...",
        ),
        *warning(
            "@sha256:" not in section.image,
            f"image {section.image} by tag: another may come by that name",
            "name@sha256:...",
            "U30",
        ),
        *warning(
            not section.ephemeral_storage,
            "no limit of ephemeral-storage: a full disk of the node may evict this pod",
            "kubernetes.ephemeral_storage",
            "K8S5",
        ),
    ]


def _refuse(
    field: str, value: str, form: re.Pattern[str], what: str, hint: str = ""
) -> Iterable[Finding]:
    return error(not form.fullmatch(value), f"kubernetes.{field}: {value!r} is {what}", hint)


def _list_names(section: KubernetesSection) -> Iterator[tuple[str, str]]:
    for field in _NAMES:
        if value := getattr(section, field):
            yield field, value
    for value in section.pull_secrets:
        yield "pull_secrets", value


def check_profile(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return the faults of a profile for this job, and its costs."""
    section, nodes, url = profile.kubernetes, spec.num_nodes, spec.checkpoint.url
    mode, durable = choose_mount_mode(spec, section), profile.overrides.DURABLE_DIR
    older, pytorch = parse_version(section.server) < FAILURE_POLICY, section.shape == "pytorchjob"
    counted = older or pytorch or section.restart_policy != "Never"
    return [
        *check_fields(spec, section),
        *explain_security(section),
        *warning(
            section.host_paths and section.security == "restricted",
            "a namespace that enforces `restricted` refuses host_paths",
            "Pod Security Standards",
        ),
        *error(
            section.grace_s <= section.checkpoint_s,
            f"{section.grace_s} s of grace, and a checkpoint takes {section.checkpoint_s} s",
            "kubernetes.grace_s",
        ),
        *error(
            nodes > 1 and mode != "ReadWriteMany",
            f"{nodes} nodes and a claim that is {mode}: the others wait for ever",
            'kubernetes.access_mode = "ReadWriteMany"',
            "K8S4",
        ),
        *note(
            section.active_deadline_s,
            "past active_deadline_s the server deletes the pods, their logs and exit codes",
            "perdure's own logs are on the volume",
        ),
        *warning(
            counted and section.shape in ("job", "pytorchjob"),
            f"preemptions count as failures, of which {section.backoff_limit} end the Job",
            "kubernetes.backoff_limit",
        ),
        *warning(
            pytorch,
            "the Training Operator starts another pod only after a kill or a notice; exit codes 3 "
            "and 75 end a PyTorchJob",
            'kubernetes.shape = "trainjob" or "job" on a server from 1.26',
        ),
        *warning(
            pytorch and nodes > 1 and section.security == "restricted",
            "the Training Operator adds an init container to workers, which has no "
            "securityContext: a namespace that enforces `restricted` refuses them",
            "Pod Security Standards",
        ),
        *error(
            spec.growth and section.shape != "job",
            f"nodes_max: pods are added beside a Job, and not to a {section.shape}",
            'kubernetes.shape = "job"',
        ),
        *warning(
            section.project and spec.launch.outputs,
            f"launch.outputs are in the image, at {section.project}: they go with the pod",
            'write them to DURABLE_DIR, or send the project (kubernetes.project = "")',
            "K8S5",
        ),
        *error(
            url.startswith("/") and not f"{url}/".startswith(f"{durable}/"),
            f"checkpoint.url = {url} is not on the volume at {durable}: it goes with the pod",
            "leave it out, or name a place on the volume",
            "K8S5",
        ),
    ]
