"""What is wrong with a job and a profile under Kubernetes, before a server is asked."""

from perdure.launch.kubernetes.manifest import find_mode
from perdure.launch.kubernetes.security import explain_security
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import FAILURE_POLICY, parse_version
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile


def check_profile(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what a person should know that the manifests alone do not show."""
    section = profile.kubernetes
    found = explain_security(section)
    if section.grace_s <= section.checkpoint_s:
        text = f"{section.grace_s} s of grace, and a checkpoint takes {section.checkpoint_s} s"
        found.append(Finding("error", text, "kubernetes.grace_s"))
    mode = find_mode(spec, section)
    if spec.num_nodes > 1 and not section.storage and mode != "ReadWriteMany":
        text = f"{spec.num_nodes} nodes and a claim that is {mode}: the others wait for ever"
        found.append(Finding("error", text, 'kubernetes.access_mode = "ReadWriteMany"', "K8S4"))
    if section.active_deadline_s:
        text = "past active_deadline_s the server deletes the pods, their logs and exit codes"
        found.append(Finding("note", text, "perdure's own logs are on the volume"))
    old = parse_version(section.server) < FAILURE_POLICY or section.restart_policy != "Never"
    if old and section.shape == "job":
        text = f"preemptions count as failures, of which {section.backoff_limit} end the Job"
        found.append(Finding("warning", text, "kubernetes.backoff_limit"))
    if spec.bus.replicas > 1:
        found.append(Finding("error", "bus.replicas: a pod holds one server", "bus.replicas = 1"))
    if spec.room and section.shape != "job":
        text = f"nodes_max: pods are added beside a Job, and not to a {section.shape}"
        found.append(Finding("error", text, 'kubernetes.shape = "job"'))
    if section.project and spec.launch.outputs:
        text = f"launch.outputs are in the image, at {section.project}: they go with the pod"
        found.append(Finding("warning", text, "write them to DURABLE_DIR, or send the project "
                             '(kubernetes.project = "")', "K8S5"))  # fmt: skip
    durable = profile.overrides.DURABLE_DIR
    if (url := spec.checkpoint.url).startswith("/") and not f"{url}/".startswith(f"{durable}/"):
        text = f"checkpoint.url = {url} is not on the volume at {durable}: it goes with the pod"
        found.append(Finding("error", text, "leave it out, or name a place on the volume", "K8S5"))
    return found
