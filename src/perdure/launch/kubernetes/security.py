"""Who a pod runs as.

The rules are those of the Pod Security Standards (kubernetes.io, "Pod Security Standards"), the
profile `restricted` with all of `baseline` in it. A trainer needs nothing that they forbid, so
every pod is made within them.
"""

from typing import Any

from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.launching import Finding
from perdure.traps.findings import note, warning


def secure_pod(section: KubernetesSection) -> dict[str, Any]:
    """Return the securityContext of a pod; empty where the image alone decides."""
    if section.security == "image":
        return {}
    root = bool(_list_added(section))
    context = {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": not root,
        "runAsUser": 0 if root else section.run_as_user,
        "fsGroup": section.fs_group,
        # What is on the volume already is given to the group once, and not at each start.
        "fsGroupChangePolicy": "OnRootMismatch" if section.fs_group else "",
    }
    return {name: value for name, value in context.items() if value}


def secure_container(section: KubernetesSection) -> dict[str, Any]:
    """Return the securityContext of a pod's container."""
    if added := _list_added(section):
        return {"capabilities": {"add": added}}
    if section.security == "image":
        return {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _list_added(section: KubernetesSection) -> list[str]:
    """Return the capabilities that the profile asks for."""
    asked = {"SYS_PTRACE": section.ptrace, "NET_ADMIN": section.net_admin}
    return [name for name, wanted in asked.items() if wanted]


def explain_security(section: KubernetesSection) -> list[Finding]:
    """Return what becomes of a pod by who it runs as, which the manifest alone does not say."""
    if section.security == "image":
        text = "pods run as whom the image says, often root, with the runtime's own capabilities"
        return warning(True, text, 'kubernetes.security = "restricted" asks for neither')
    if added := _list_added(section):
        text = f"{' and '.join(added)}, which serves root only; pods run as the image says"
        hint = "kubernetes.ptrace: doctor in the job says whether stacks need it; net_admin: for tc"
        return warning(True, text, hint)
    user = section.run_as_user
    text = "an image whose user is root does not start (CreateContainerConfigError)"
    return [
        *note(not user, text, "kubernetes.run_as_user, unless the cluster chooses one"),
        *note(
            user,
            f"pods run as user {user}, whoever the image's own is (often root): what"
            " only root may read or write there is closed to them",
            "kubernetes.run_as_user, kubernetes.fs_group for the volume, or "
            'kubernetes.security = "image"',
        ),
    ]
