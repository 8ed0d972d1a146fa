"""What is wrong with a job and a profile under Kubernetes, before a server is asked."""

from perdure.launch.kubernetes.manifest import find_mode
from perdure.launch.kubernetes.security import explain_security
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import FAILURE_POLICY, parse_version
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.traps.findings import error, note, warning


def check_profile(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what a person should know that the manifests alone do not show."""
    section, nodes, url = profile.kubernetes, spec.num_nodes, spec.checkpoint.url
    mode, durable = find_mode(spec, section), profile.overrides.DURABLE_DIR
    counted = parse_version(section.server) < FAILURE_POLICY or section.restart_policy != "Never"
    return [
        *explain_security(section),
        *error(
            section.grace_s <= section.checkpoint_s,
            f"{section.grace_s} s of grace, and a checkpoint takes {section.checkpoint_s} s",
            "kubernetes.grace_s",
        ),
        *error(
            nodes > 1 and not section.storage and mode != "ReadWriteMany",
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
            counted and section.shape == "job",
            f"preemptions count as failures, of which {section.backoff_limit} end the Job",
            "kubernetes.backoff_limit",
        ),
        *error(spec.bus.replicas > 1, "bus.replicas: a pod holds one server", "bus.replicas = 1"),
        *error(
            spec.room and section.shape != "job",
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
