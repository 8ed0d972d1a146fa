"""A machine of the cluster: process 1 of namespaces of its own, and all daemons below it.

    unshare --mount --net --pid --fork --kill-child --mount-proc python node.py FOLDER

The first one has the control plane as well; another one has the first one's address as `server` in
its `node.json`. Mounts, network, processes and the kernel's settings that a kubelet touches are
private here, so that nothing has to be undone: with this process all of it is gone. Only its
cgroups would stay, and they are removed. It runs until its standard input ends, as it does when a
test run is killed.
Uses nothing but Python.
"""

import contextlib
import json
import os
import select
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

SERVICES = "10.99.0"
_KEPT = {  # What a kubelet would set in the kernel of this machine.
    "vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10",
    "kernel/panic_on_oops": "1", "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}  # fmt: skip
_CONTROLLERS = (
    "job,persistentvolume-binder,pvc-protection,pv-protection,ttl-after-finished,garbagecollector,nodelifecycle,namespace,"
    "podgc,attachdetach,root-ca-cert-publisher,serviceaccount,serviceaccount-token,endpoint,"
    "disruption"
)
_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd-state"
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
_AUDIT = {  # What service accounts of the tests' own namespaces have asked for.
    "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
              {"level": "Metadata", "userGroups": ["system:serviceaccounts"]}],
}  # fmt: skip
_CTR = ("ctr", "-a", "/run/containerd.sock", "-n", "k8s.io")
_KUBELET: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs", "failSwapOn": False, "makeIPTablesUtilChains": False,
    "port": 10250, "readOnlyPort": 0, "healthzPort": 0, "clusterDomain": "cluster.local",
    "resolvConf": "/dev/null", "nodeStatusUpdateFrequency": "2s",
    "nodeStatusReportFrequency": "5s", "evictionPressureTransitionPeriod": "5s",
    "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%",
                     "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100, "volumeStatsAggPeriod": "10s",
}  # fmt: skip


class Node:
    """Kubelet, and the control plane if it is the first; everything is below `folder`."""

    def __init__(self, folder: Path) -> None:
        told = json.loads((folder / "node.json").read_text())
        self.folder, self.address = folder, told["address"]
        self.hostname, self.pods = told["hostname"], told["pods"]
        self.server, self.token = told["server"], told["token"]
        self.first = self.server == self.address
        self.programs, self.images = Path(told["programs"]), told["images"]
        self.cgroup = told["name"]
        self.parts: dict[str, subprocess.Popen[bytes]] = {}

    def isolate(self) -> None:
        """Have nothing that the daemons write outside `folder` reach this machine."""
        run("mount", "-t", "tmpfs", "tmpfs", "/run")
        Path("/run/netns").mkdir()
        upper, work = self.folder / "var", self.folder / "var-work"
        upper.mkdir()
        work.mkdir()
        layers = f"lowerdir=/var,upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "-o", layers, "overlay", "/var")
        for name, value in _KEPT.items():
            held = self.folder / "sys" / name
            held.parent.mkdir(parents=True, exist_ok=True)
            held.write_text(value)
            run("mount", "--bind", str(held), f"/proc/sys/{name}")
        run("ip", "link", "set", "lo", "up")
        if self.first:
            run("ip", "address", "add", f"{SERVICES}.1/32", "dev", "lo")

    def wait_network(self) -> None:
        """Wait for this machine's end of the cable, which is plugged in from outside."""
        wait(lambda: Path("/proc/self/net/dev").read_text().count("eth0"), "the cable")
        run("ip", "address", "add", f"{self.address}/30", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        if not self.first:
            run("ip", "route", "add", "default", "via", find_gateway(self.address))

    def start(self, name: str, *words: str) -> None:
        with open(self.folder / "log" / f"{name}.log", "ab") as log:
            self.parts[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )

    def start_control_plane(self) -> None:
        here = "http://127.0.0.1"
        self.start(
            "etcd", "etcd", "--data-dir=etcd", f"--listen-client-urls={here}:2379",
            f"--advertise-client-urls={here}:2379", f"--listen-peer-urls={here}:2380",
            f"--initial-advertise-peer-urls={here}:2380", f"--initial-cluster=default={here}:2380",
            "--unsafe-no-fsync",
        )  # fmt: skip
        pki = self.folder / "pki"
        pki.mkdir()
        (pki / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        (pki / "audit.json").write_text(json.dumps(_AUDIT))
        run("openssl", "genrsa", "-out", str(pki / "accounts.key"), "2048")
        self.start(
            "kube-apiserver", str(self.programs / "kube-apiserver"),
            f"--etcd-servers={here}:2379", "--secure-port=443", "--bind-address=0.0.0.0",
            f"--advertise-address={self.address}", f"--cert-dir={pki}/server",
            f"--token-auth-file={pki}/tokens.csv", "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICES}.0/24",
            f"--service-account-key-file={pki}/accounts.key",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--service-account-issuer=https://kubernetes.default", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
            f"--audit-policy-file={pki}/audit.json", f"--audit-log-path={self.folder}/audit.log",
        )  # fmt: skip
        wait(self._is_ready, "the API server")
        self.start(
            "kube-controller-manager", str(self.programs / "kube-controller-manager"),
            f"--kubeconfig={self.folder}/kubeconfig", f"--controllers={_CONTROLLERS}",
            f"--service-account-private-key-file={pki}/accounts.key",
            f"--root-ca-file={pki}/server/apiserver.crt", "--leader-elect=false", "--port=0",
            "--secure-port=0", "--feature-gates=TTLAfterFinished=true",
            "--node-monitor-grace-period=10s", "--node-monitor-period=1s",
        )  # fmt: skip
        self.start(
            "kube-scheduler", str(self.programs / "kube-scheduler"),
            f"--kubeconfig={self.folder}/kubeconfig", "--leader-elect=false", "--port=0",
            "--secure-port=0",
        )  # fmt: skip

    def write_config(self) -> None:
        """Write what kubectl and the daemons find the API server by."""
        cluster = {"server": f"https://{self.server}", "insecure-skip-tls-verify": True}
        context = {"cluster": "test", "user": "admin"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": context}],
        }  # fmt: skip
        (self.folder / "kubeconfig").write_text(json.dumps(config))

    def _is_ready(self) -> bool:
        asked = urllib.request.Request(
            f"https://{self.address}/readyz", headers={"Authorization": f"Bearer {self.token}"}
        )
        insecure = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(asked, timeout=5, context=insecure) as answer:
                return bool(answer.read() == b"ok")
        except OSError:
            return False

    def start_containers(self) -> None:
        (self.folder / "cni").mkdir()
        plugins = [
            {"type": "bridge", "bridge": "pods", "isGateway": True, "ipMasq": False,
             "ipam": {"type": "host-local", "subnet": f"{self.pods}.0/24",
                      "routes": [{"dst": "0.0.0.0/0"}]}},
            {"type": "loopback"},
        ]  # fmt: skip
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        (pause,) = (reference for reference in self.images if "/pause@" in reference)
        config = self.folder / "containerd.toml"
        config.write_text(_CONTAINERD.format(folder=self.folder, pause=pause))
        self.start("containerd", "containerd", "--config", str(config))
        wait(lambda: run(*_CTR, "version", check=False) == 0, "containerd")
        for reference, file in self.images.items():
            self.import_image(reference.partition("@")[0], file)

    def import_image(self, name: str, file: str) -> None:
        """Have containerd know the image of an archive as `name@DIGEST`."""
        run(*_CTR, "images", "import", "--digests", "--base-name", name, file)

    def start_kubelet(self) -> None:
        """Start the kubelet; its cgroups are below one of the cluster's own."""
        for controller in Path("/sys/fs/cgroup").iterdir():
            with contextlib.suppress(OSError):
                (controller / self.cgroup).mkdir(exist_ok=True)
        cpus = Path("/sys/fs/cgroup/cpuset", self.cgroup)
        if cpus.is_dir():
            for name in ("cpuset.cpus", "cpuset.mems"):
                (cpus / name).write_text((cpus.parent / name).read_text())
        config = self.folder / "kubelet.json"
        settings = {**_KUBELET, "address": self.address, "cgroupRoot": f"/{self.cgroup}"}
        config.write_text(json.dumps(settings))
        root = self.folder / "kubelet"
        self.start(
            "kubelet", str(self.programs / "kubelet"), f"--config={config}",
            f"--kubeconfig={self.folder}/kubeconfig", f"--root-dir={root}",
            f"--cert-dir={root}/pki", f"--volume-plugin-dir={root}/plugins",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd.sock",
            f"--hostname-override={self.hostname}", f"--node-ip={self.address}",
        )  # fmt: skip

    def obey(self) -> None:
        """Do what standard input says, a word a line, until it ends; reap whoever is left."""
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not select.select([sys.stdin], [], [], 0.5)[0]:
                continue
            line = sys.stdin.readline().split()
            if not line:
                return
            if line == ["stop", "kubelet"]:
                self.parts["kubelet"].kill()
            if line == ["start", "kubelet"]:
                self.start_kubelet()
            if line[0] == "import":
                self.import_image(*line[1:])
                print("imported", flush=True)

    def stop(self) -> None:
        """Kill everything, and remove the cgroups."""
        assert os.getpid() == 1  # Elsewhere this would be everything on the machine.
        os.kill(-1, 9)
        until = time.monotonic() + 10
        while time.monotonic() < until and not remove_cgroups(self.cgroup):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.05)


def remove_cgroups(name: str) -> bool:
    """Remove the cgroups below one, as far as no process is in them; return whether all are."""
    left = [path for path in Path("/sys/fs/cgroup").glob(f"*/{name}/**/") if path.is_dir()]
    for folder in sorted(left, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not any(path.exists() for path in left)


def find_gateway(address: str) -> str:
    """Return the other end of the cable of a machine that is not the first."""
    head, _, last = address.rpartition(".")
    return f"{head}.{int(last) - 1}"


def run(*words: str, check: bool = True) -> int:
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.returncode


def wait(condition: Any, what: str, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"no {what} after {timeout_s:g} s")
        time.sleep(0.1)


def main() -> None:
    if os.getpid() != 1:
        sys.exit("not in namespaces of its own")
    folder = Path(sys.argv[1])
    (folder / "log").mkdir()
    node = Node(folder)
    try:
        node.isolate()
        print("ready for the cable", flush=True)
        node.wait_network()
        node.write_config()
        if node.first:
            node.start_control_plane()
        node.start_containers()
        node.start_kubelet()
        print("started", flush=True)
        node.obey()
    finally:
        node.stop()


if __name__ == "__main__":
    main()
