"""D5: every pod that perdure makes is admitted by a namespace that enforces `restricted`.

The table is the public standard ("Pod Security Standards" on kubernetes.io: `restricted`, which
has all of `baseline` in it), field by field as it stands there.
"""

import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from perdure.launch.catalog import load_profile
from perdure.launch.kubernetes import render
from perdure.launch.kubernetes.manifest import list_added_jobs, make_added, make_reader
from perdure.launch.kubernetes.pod import Pod, make_user_variables
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.platforms.profile import Profile

UNDEFINED = None
CONTAINERS = ("containers[*]", "initContainers[*]", "ephemeralContainers[*]")
ANYWHERE = ("", *(f"{one}." for one in CONTAINERS))
# Control -> (fields, allowed values). A field may stand in the pod or in its containers.
STANDARD: dict[str, tuple[list[str], list[Any]]] = {
    "HostProcess": ([f"{at}securityContext.windowsOptions.hostProcess" for at in ANYWHERE],
                    [UNDEFINED, False]),
    "Host Namespaces": (["hostNetwork", "hostPID", "hostIPC"], [UNDEFINED, False]),
    "Privileged Containers": ([f"{c}.securityContext.privileged" for c in CONTAINERS],
                              [UNDEFINED, False]),
    "HostPath Volumes": (["volumes[*].hostPath"], [UNDEFINED]),
    "Host Ports": ([f"{c}.ports[*].hostPort" for c in CONTAINERS], [UNDEFINED, 0]),
    "Host Probes / Lifecycle Hooks": (
        [f"{c}.{probe}.{way}.host" for c in CONTAINERS for way in ("httpGet", "tcpSocket")
         for probe in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle.postStart",
                       "lifecycle.preStop")], [UNDEFINED, ""]),
    "AppArmor": ([f"{at}securityContext.appArmorProfile.type" for at in ANYWHERE],
                 [UNDEFINED, "RuntimeDefault", "Localhost"]),
    "SELinux type": ([f"{at}securityContext.seLinuxOptions.type" for at in ANYWHERE],
                     [UNDEFINED, "", "container_t", "container_init_t", "container_kvm_t",
                      "container_engine_t"]),
    "SELinux user and role": ([f"{at}securityContext.seLinuxOptions.{name}" for at in ANYWHERE
                               for name in ("user", "role")], [UNDEFINED, ""]),
    "/proc Mount Type": ([f"{c}.securityContext.procMount" for c in CONTAINERS],
                         [UNDEFINED, "Default"]),
    "Seccomp, baseline": ([f"{at}securityContext.seccompProfile.type" for at in ANYWHERE],
                          [UNDEFINED, "RuntimeDefault", "Localhost"]),
    "Sysctls": (["securityContext.sysctls[*].name"],
                [UNDEFINED, "kernel.shm_rmid_forced", *(f"net.ipv4.{name}" for name in (
                    "ip_local_port_range", "ip_unprivileged_port_start", "tcp_syncookies",
                    "ping_group_range", "ip_local_reserved_ports", "tcp_keepalive_time",
                    "tcp_fin_timeout", "tcp_keepalive_intvl", "tcp_keepalive_probes", "tcp_rmem",
                    "tcp_wmem"))]),
    "Volume Types": ([f"volumes[*].{kind}" for kind in (
        "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flexVolume",
        "flocker", "gcePersistentDisk", "gitRepo", "glusterfs", "hostPath", "image", "iscsi",
        "nfs", "photonPersistentDisk", "portworxVolume", "quobyte", "rbd", "scaleIO", "storageos",
        "vsphereVolume")], [UNDEFINED]),
    "Privilege Escalation": ([f"{c}.securityContext.allowPrivilegeEscalation" for c in CONTAINERS],
                             [False]),
    "Running as Non-root user": ([f"{at}securityContext.runAsUser" for at in ANYWHERE],
                                 [UNDEFINED, *range(1, 70000)]),
    "Capabilities, added": ([f"{c}.securityContext.capabilities.add[*]" for c in CONTAINERS],
                            [UNDEFINED, "NET_BIND_SERVICE"]),
}  # fmt: skip
# Of these the pod may say it for its containers, or each container for itself.
INHERITED: dict[str, tuple[str, list[Any]]] = {
    "Running as Non-root": ("securityContext.runAsNonRoot", [True]),
    "Seccomp": ("securityContext.seccompProfile.type", ["RuntimeDefault", "Localhost"]),
}


def read(value: Any, path: str) -> Iterator[Any]:
    """Yield what stands at a path such as `containers[*].ports[*].hostPort`."""
    name, _, rest = path.partition(".")
    if name.endswith("[*]"):
        for one in (value or {}).get(name[:-3]) or ():
            yield from read(one, rest) if rest else [one]
        return
    found = value.get(name) if isinstance(value, dict) else None
    yield from read(found, rest) if rest and found is not None else [found]


def find_broken(pod: Any) -> list[str]:
    """Return the controls of the standard that a pod breaks."""
    broken = [control for control, (fields, allowed) in STANDARD.items()
              if any(one not in allowed for path in fields for one in read(pod, path))]  # fmt: skip
    boxes = [one for kind in CONTAINERS for one in pod.get(kind[:-3]) or ()]
    for control, (path, allowed) in INHERITED.items():
        above = next(read(pod, path))
        said = [one if (one := next(read(box, path))) is not None else above for box in boxes]
        broken += [control] if any(one not in allowed for one in said) else []
    dropped = [next(read(box, "securityContext.capabilities.drop")) or () for box in boxes]
    broken += ["Capabilities, dropped"] if not all("ALL" in one for one in dropped) else []
    return broken


def make_profile(**section: Any) -> Profile:
    found = load_profile("kubernetes", "/nowhere").profile
    image = "registry.example/train@sha256:" + "0" * 64
    return structs.replace(found, kubernetes=KubernetesSection(**{"image": image} | section))


def make_pods(nodes: int = 1, **section: Any) -> list[Any]:
    """Return every pod that perdure makes for one job: first, others, added and readers."""
    profile = make_profile(**{"secret": "tokens"} | section)
    launch = LaunchConfig(project="/srv/proj", gpus=2, secrets=("HF_TOKEN",))
    spec = JobSpec(name="gpt", script="t.py", nodes=nodes, nodes_max=nodes + 1, launch=launch)
    plan = render(spec, profile)
    record = LaunchRecord(job="gpt", profile=profile, place="/checkpoints/launched/gpt", id="gpt",
                          home="/checkpoints/state", python="python3")  # fmt: skip
    found = [one for text in plan.files.values() for one in yaml.safe_load_all(text)]
    found += [make_added(spec, profile, name) for name in list_added_jobs(spec, nodes + 1)]
    found.append(make_reader(record, "reader"))
    pods: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            pods.extend([value] if "containers" in value else [])
            for one in value.values():
                collect(one)
        elif isinstance(value, list):
            for one in value:
                collect(one)

    collect(found)
    return pods


@pytest.mark.parametrize("shape", ["job", "jobset", "trainjob", "pytorchjob"])
@pytest.mark.parametrize("server", ["1.20", "1.25", "1.31"])
@pytest.mark.parametrize("more", [{}, {"service_account": "perdure"}, {"run_as_user": 0}])
def test_d5_every_pod_is_admitted_by_a_restricted_namespace(
    shape: str, server: str, more: dict[str, Any]
) -> None:
    pods = make_pods(2, shape=shape, server=server, **more)
    assert len(pods) >= 3
    for pod in pods:
        assert find_broken(pod) == []
        assert pod["securityContext"]["fsGroup"] == 1000


BROKEN: list[tuple[str, Any]] = [
    ("hostNetwork", True), ("hostPID", True), ("hostIPC", True),
    ("securityContext.windowsOptions", {"hostProcess": True}),
    ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ("securityContext.runAsUser", 0), ("securityContext.runAsNonRoot", False),
    ("securityContext.seccompProfile", {"type": "Unconfined"}), ("securityContext", {}),
    ("securityContext.seLinuxOptions", {"type": "spc_t"}),
    ("securityContext.seLinuxOptions", {"user": "root"}),
    ("securityContext.appArmorProfile", {"type": "Unconfined"}),
    ("volumes.0", {"name": "durable", "hostPath": {"path": "/"}}),
    ("volumes.0", {"name": "durable", "nfs": {"path": "/", "server": "x"}}),
    ("containers.0.securityContext.privileged", True),
    ("containers.0.securityContext.allowPrivilegeEscalation", True),
    ("containers.0.securityContext.capabilities", {"drop": ["NET_RAW"]}),
    ("containers.0.securityContext.capabilities", {"drop": ["ALL"], "add": ["SYS_PTRACE"]}),
    ("containers.0.securityContext.procMount", "Unmasked"),
    ("containers.0.securityContext.runAsNonRoot", False),
    ("containers.0.securityContext.runAsUser", 0),
    ("containers.0.securityContext.seccompProfile", {"type": "Unconfined"}),
    ("containers.0.ports", [{"containerPort": 1, "hostPort": 1}]),
    ("containers.0.livenessProbe", {"httpGet": {"host": "10.0.0.1", "port": 1}}),
    ("containers.0.lifecycle", {"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}}),
    ("initContainers", [{"name": "x", "image": "y"}]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_d5_the_table_sees_what_a_restricted_namespace_refuses(path: str, value: Any) -> None:
    pod = copy.deepcopy(make_pods()[0])
    *way, last = path.split(".")
    at: Any = pod
    for word in way:
        at = at[int(word)] if isinstance(at, list) else at[word]
    at[int(last) if isinstance(at, list) else last] = value
    assert find_broken(pod)


@pytest.mark.parametrize(
    ("section", "level", "words"),
    [
        ({}, "note", "run as user 1000"),
        ({"run_as_user": 0}, "note", "whose user is root does not start"),
        ({"security": "image"}, "warning", "whom the image says"),
        ({"ptrace": True}, "warning", "SYS_PTRACE, which serves root only"),
        ({"net_admin": True}, "warning", "NET_ADMIN, which serves root only"),
        ({"host_paths": ("/opt/envs",)}, "warning", "refuses host_paths"),
    ],
)
def test_d5_who_a_pod_runs_as_is_a_finding(section: dict[str, Any], level: str, words: str) -> None:
    plan = render(JobSpec(name="gpt", script="t.py"), make_profile(**section))
    assert [f.level for f in plan.findings if words in f.text] == [level]
    assert not [f for f in plan.findings if f.level == "error"]


def test_d5_nothing_is_asked_for_where_the_image_decides() -> None:
    for pod in make_pods(security="image"):
        assert "securityContext" not in pod
        assert "securityContext" not in pod["containers"][0]


@pytest.mark.parametrize("security", ["restricted", "image"])
def test_d5_a_capability_is_added_for_who_asks_for_it(security: str) -> None:
    for pod in make_pods(security=security, ptrace=True, net_admin=True):
        context = pod["containers"][0]["securityContext"]
        assert context == {"capabilities": {"add": ["SYS_PTRACE", "NET_ADMIN"]}}
        assert not {"runAsUser", "runAsNonRoot"} & {*pod.get("securityContext", {})}


def test_d5_a_user_without_a_name_has_a_home_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    found = make_user_variables({"HOME": "/"})
    assert found == {"HOME": tempfile.gettempdir(), "USER": "perdure"}
    assert make_user_variables({"HOME": "/nonexistent", "USER": "ada"})["USER"] == "ada"


def test_d5_a_volume_that_may_not_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Any, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    environ = {"PERDURE_DURABLE_DIR": str(tmp_path), "JOB_COMPLETION_INDEX": "0"}
    pod = Pod(JobSpec(name="gpt", script="t.py"), environ, tmp_path / "job.json")
    monkeypatch.setattr(os, "makedirs", refuse)
    assert pod.run() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "may not write" in line
    assert "kubernetes.run_as_user" in line
