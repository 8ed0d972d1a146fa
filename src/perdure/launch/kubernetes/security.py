"""Who a pod runs as, and what a namespace that enforces `restricted` would refuse it for.

The rules are those of the Pod Security Standards (kubernetes.io, "Pod Security Standards"), the
profile `restricted` with all of `baseline` in it. A trainer needs nothing that they forbid, so
every pod is made within them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.launching import Finding
from perdure.traps.findings import note, warning

Object = Mapping[str, Any]
_VOLUMES = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
)  # fmt: skip
_SYSCTLS = (
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
)  # fmt: skip
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_SELINUX = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SECCOMP = ("RuntimeDefault", "Localhost")


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


def find_violations(pod: Object) -> list[str]:
    """Return what `restricted` refuses in the spec of a pod, each as a field and its value."""
    context = _map(pod, "securityContext")
    kinds = (kind for volume in _list(pod, "volumes") for kind in volume)
    sysctls = (one.get("name") for one in _list(context, "sysctls"))
    parts = ("initContainers", "containers", "ephemeralContainers")
    return [
        *(f"{name}: true" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)),
        *(f"volumes: {kind}" for kind in kinds if kind not in {"name", *_VOLUMES}),
        *(f"securityContext.sysctls: {name}" for name in sysctls if name not in _SYSCTLS),
        *_find_in_context(context, "securityContext"),
        *(
            text
            for part in parts
            for container in _list(pod, part)
            for text in _find_in_container(container, context)
        ),
    ]


def _find_in_container(container: Object, pod: Object) -> Iterator[str]:
    at, own = f"container {container.get('name', '?')}", _map(container, "securityContext")
    capabilities, hooks = _map(own, "capabilities"), _map(container, "lifecycle")
    seccomp = _map(own if "seccompProfile" in own else pod, "seccompProfile").get("type")
    rows = {
        "privileged: true": own.get("privileged"),
        "allowPrivilegeEscalation is not false": own.get("allowPrivilegeEscalation") is not False,
        f"procMount: {own.get('procMount')}": own.get("procMount", "Default") != "Default",
        "capabilities.drop has no ALL": "ALL" not in (capabilities.get("drop") or ()),
        **{
            f"capabilities.add: {name}": name != "NET_BIND_SERVICE"
            for name in capabilities.get("add") or ()
        },
        "runAsNonRoot is not true": own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True,
        "seccompProfile.type is not RuntimeDefault": seccomp not in _SECCOMP,
        **{
            f"hostPort: {port.get('hostPort')}": port.get("hostPort")
            for port in _list(container, "ports")
        },
        **{
            f"{way}.host: {host}": host
            for hook in (
                *(_map(container, name) for name in _PROBES),
                *(_map(hooks, name) for name in ("postStart", "preStop")),
            )
            for way in ("httpGet", "tcpSocket")
            if (host := _map(hook, way).get("host"))
        },
    }
    yield from _find_in_context(own, at)
    yield from (f"{at}: {text}" for text, refused in rows.items() if refused)


def _find_in_context(context: Object, at: str) -> Iterator[str]:
    """Yield what is refused in a securityContext, of a pod as of a container."""
    kinds = {
        name: _map(context, name).get("type", "RuntimeDefault")
        for name in ("seccompProfile", "appArmorProfile")
    }
    selinux = _map(context, "seLinuxOptions")
    role = selinux.get("user") or selinux.get("role")
    rows = {
        "runAsUser: 0": context.get("runAsUser") == 0,
        "windowsOptions.hostProcess: true": _map(context, "windowsOptions").get("hostProcess"),
        **{f"{name}.type: {kind}": kind not in _SECCOMP for name, kind in kinds.items()},
        "seLinuxOptions": role or selinux.get("type", "") not in _SELINUX,
    }
    yield from (f"{at}: {text}" for text, refused in rows.items() if refused)


def _map(value: Object, name: str) -> Object:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _list(value: Object, name: str) -> Sequence[Object]:
    found = value.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
