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
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not section.ptrace:
        context["runAsNonRoot"] = True
        if section.run_as_user:
            context["runAsUser"] = section.run_as_user
    if section.fs_group:
        # What is on the volume already is given to the group once, and not at each start.
        context |= {"fsGroup": section.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def secure_container(section: KubernetesSection) -> dict[str, Any]:
    """Return the securityContext of a pod's container."""
    if section.security == "image":
        return {}
    if section.ptrace:
        return {"capabilities": {"add": ["SYS_PTRACE"]}}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def explain_security(section: KubernetesSection) -> list[Finding]:
    """Return what becomes of a pod by who it runs as, which the manifest alone does not say."""
    if section.security == "image":
        text = "pods run as whom the image says, often root, with the runtime's own capabilities"
        return warning(True, text, 'kubernetes.security = "restricted" asks for neither')
    if section.ptrace:
        text = "kubernetes.ptrace: SYS_PTRACE, which serves root only; pods run as the image says"
        return warning(True, text, "doctor in the job says whether stacks need it")
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
    found = [f"{name}: true" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for volume in _list(pod, "volumes"):
        found += [f"volumes: {kind}" for kind in volume if kind not in {"name", *_VOLUMES}]
    for one in _list(context, "sysctls"):
        if one.get("name") not in _SYSCTLS:
            found.append(f"securityContext.sysctls: {one.get('name')}")
    found += _find_in_context(context, "securityContext")
    for container in _list_containers(pod):
        found += _find_in_container(container, context)
    return found


def _find_in_container(container: Object, pod: Object) -> Iterator[str]:
    at, own = f"container {container.get('name', '?')}", _map(container, "securityContext")
    yield from _find_in_context(own, at)
    if own.get("privileged"):
        yield f"{at}: privileged: true"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{at}: allowPrivilegeEscalation is not false"
    if own.get("procMount", "Default") != "Default":
        yield f"{at}: procMount: {own['procMount']}"
    capabilities = _map(own, "capabilities")
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{at}: capabilities.drop has no ALL"
    for name in capabilities.get("add") or ():
        if name != "NET_BIND_SERVICE":
            yield f"{at}: capabilities.add: {name}"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield f"{at}: runAsNonRoot is not true"
    if _map(own if "seccompProfile" in own else pod, "seccompProfile").get("type") not in _SECCOMP:
        yield f"{at}: seccompProfile.type is not RuntimeDefault"
    for port in _list(container, "ports"):
        if port.get("hostPort"):
            yield f"{at}: hostPort: {port['hostPort']}"
    hooks = _map(container, "lifecycle")
    probes = [_map(container, name) for name in _PROBES]
    for hook in (*probes, _map(hooks, "postStart"), _map(hooks, "preStop")):
        for way in ("httpGet", "tcpSocket"):
            if host := _map(hook, way).get("host"):
                yield f"{at}: {way}.host: {host}"


def _find_in_context(context: Object, at: str) -> Iterator[str]:
    """Yield what is refused in a securityContext, of a pod as of a container."""
    if context.get("runAsUser") == 0:
        yield f"{at}: runAsUser: 0"
    if _map(context, "windowsOptions").get("hostProcess"):
        yield f"{at}: windowsOptions.hostProcess: true"
    if _map(context, "seccompProfile").get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{at}: seccompProfile.type: {context['seccompProfile']['type']}"
    profile = _map(context, "appArmorProfile").get("type", "RuntimeDefault")
    if profile not in _SECCOMP:
        yield f"{at}: appArmorProfile.type: {profile}"
    selinux = _map(context, "seLinuxOptions")
    if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
        yield f"{at}: seLinuxOptions"


def _list_containers(pod: Object) -> list[Object]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [one for kind in kinds for one in _list(pod, kind)]


def _map(value: Object, name: str) -> Object:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _list(value: Object, name: str) -> Sequence[Object]:
    found = value.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
