"""A real Kubernetes on this machine, of one node or two, each in namespaces of its own (`node.py`).

python -m tests.platforms.k8s.cluster        # a cluster to play with, until Ctrl-C
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.platforms.k8s.image import write_images
from tests.platforms.k8s.node import find_gateway, remove_cgroups

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = Path(
    os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "perdure", "k8s-1.20.2"
)  # fmt: skip
NEEDED = ("etcd", "containerd", "runc", "kubectl", "unshare", "nsenter", "ip", "openssl")
NODE, SECOND = "gpu-node-1", "gpu-node-2"


def find_lack() -> str:
    """Return why no Kubernetes can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or not (PROGRAMS / "kubelet").exists():
        return f"no {missing[0] if missing else 'kubelet'}: `make platforms-k8s` gets it"
    return "" if Path("/sys/fs/cgroup/memory").is_dir() else "no cgroups of version 1"


class Machine:
    """A machine of the cluster, in namespaces of its own; all about it lies in `root`."""

    def __init__(self, root: Path, **told: Any) -> None:
        """Write what `node.py` is told: name, address, hostname and so on."""
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.cgroup = root, str(told["name"])
        self.process: subprocess.Popen[str] | None = None
        (root / "node.json").write_text(json.dumps({**told, "programs": str(PROGRAMS)}))

    def power_on(self) -> None:
        """Make its namespaces, and wait until a cable can be plugged in."""
        with open(self.root / "node.err", "ab") as errors:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
                 sys.executable, "-P", str(Path(__file__).with_name("node.py")), str(self.root)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop it.
            )  # fmt: skip
        self.expect("ready for the cable")

    def find_init(self) -> str:
        """Return the pid of its process 1."""
        assert self.process is not None
        outer = self.process.pid
        return Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]

    def expect(self, line: str) -> None:
        """Wait for a line of its own; it has to be the next."""
        assert self.process is not None
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != line:
            raise AssertionError(f"{self.cgroup} did not come up\n{self.read_logs()}")

    def tell(self, words: str) -> None:
        """Have it do `stop kubelet`, `start kubelet` or `import NAME FILE`."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """End everything; what is left is the folder."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.process = None
        remove_cgroups(self.cgroup)

    def power_off(self) -> None:
        """Kill everything on it at once, kubelet and pods, with no time to say so."""
        os.kill(int(self.find_init()), signal.SIGKILL)
        self.stop()

    def read_logs(self) -> str:
        """Return the last lines of every daemon."""
        files = [self.root / "node.err", *sorted((self.root / "log").glob("*.log"))]
        return "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n"
            for path in files
            if path.exists()
        )


class Kubernetes:
    """A cluster; `start` takes about 15 s. Its API is reached by `kubectl` with `env`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.first: Machine | None = None
        self.second: Machine | None = None
        self.image = ""
        """A machine like this one, for pods that mount folders of it."""
        self.env = {"KUBECONFIG": str(root / "kubeconfig")}

    def start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        images = write_images(self.root)
        self.image = next(reference for reference in images if "/host@" in reference)
        number = os.getpid() % 60
        while Path(f"/sys/class/net/pdk{number}").exists():
            number += 1
        name, self._network = f"pdk{number}", f"10.98.{number}"
        address = f"{self._network}.1"
        self._told = {
            "name": f"perdure-{name}", "server": address, "token": secrets.token_hex(16),
            "images": {key: str(path) for key, path in images.items()},
        }  # fmt: skip
        self.first = Machine(
            self.root, **self._told, address=address, hostname=NODE, pods="10.97.0"
        )
        self.first.power_on()
        inner = self.first.find_init()
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", inner)
        run("ip", "address", "add", f"{self._network}.2/30", "dev", name)
        run("ip", "link", "set", name, "up")
        self.first.expect("started")
        self.wait(lambda: self._is_ready(), "a ready node")

    def add_machine(self) -> Machine:
        """Add a machine with a kubelet, joined to the first by a cable; return it once ready."""
        assert self.first is not None
        assert self.second is None
        address, pods = f"{self._network}.6", "10.97.1"
        told = {**self._told, "name": f"{self._told['name']}-2"}
        self.second = Machine(
            Path(tempfile.mkdtemp(prefix="second-", dir=self.root)),
            **told, address=address, hostname=SECOND, pods=pods,
        )  # fmt: skip
        self.second.power_on()
        first = self.first.find_init()
        run("ip", "link", "add", "eth0", "netns", self.second.find_init(),
            "type", "veth", "peer", "name", "second", "netns", first)  # fmt: skip
        inside = ("nsenter", f"--net=/proc/{first}/ns/net", "ip")
        run(*inside, "address", "add", f"{find_gateway(address)}/30", "dev", "second")
        run(*inside, "link", "set", "second", "up")
        run(*inside, "route", "add", f"{pods}.0/24", "via", address)
        self.second.expect("started")
        self.wait(lambda: self.is_node_ready(SECOND), "a second ready node")
        return self.second

    def remove_machine(self) -> None:
        """Take the second machine away, and have the cluster forget it."""
        if self.second is not None:
            self.second.stop()
            self.second = None
            self.kubectl("delete", "node", SECOND, "--ignore-not-found")
            self.kubectl(
                "delete",
                "pods",
                f"--field-selector=spec.nodeName={SECOND}",
                "--grace-period=0",
                "--force",
            )  # Nobody else says that they have ended.

    def is_node_ready(self, name: str) -> bool:
        """Return whether the server holds a node for ready."""
        conditions = self.get("node", name)["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _is_ready(self) -> bool:
        ready = self.is_node_ready(NODE)
        return ready and self.get("serviceaccount", "default")["metadata"]["name"] == "default"

    def stop(self) -> None:
        """End everything; what is left is the folder."""
        for machine in (self.second, self.first):
            if machine is not None:
                machine.stop()
        self.first = self.second = None

    def tell(self, words: str) -> None:
        """Have the first machine do something."""
        assert self.first is not None
        self.first.tell(words)

    def import_image(self, name: str, file: Path) -> None:
        """Have the node's containerd know the image of an OCI archive as `name@DIGEST`."""
        self.tell(f"import {name} {file}")
        assert self.first is not None
        self.first.expect("imported")

    def kubectl(self, *words: str, stdin: str = "", timeout_s: float = 60.0) -> str:
        """Return what kubectl prints; it has to succeed."""
        done = subprocess.run(
            ["kubectl", *words], env={**os.environ, **self.env}, input=stdin,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        """Return objects as the server has them."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def create(self, *documents: Any) -> None:
        self.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def make_volume(self, name: str, folder: Path) -> None:
        """Make a persistent volume of a folder; a claim that asks for one may get it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.create(
            {
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": "100Gi"}, "hostPath": {"path": str(folder)},
                    "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                    "persistentVolumeReclaimPolicy": "Retain",
                },
            }
        )  # fmt: skip

    def add_gpus(self, count: int) -> None:
        """Have the node offer GPUs, as a device plugin would; there are none behind it."""
        patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
        self.request("PATCH", f"/api/v1/nodes/{NODE}/status", patch, "application/json-patch+json")

    def evict(self, pod: str) -> None:
        """Ask the eviction API for a pod, as `kubectl drain` and autoscalers do."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
        self.request("POST", f"/api/v1/namespaces/default/pods/{pod}/eviction", body)

    def request(self, method: str, path: str, body: Any, kind: str = "application/json") -> None:
        """Ask the API for what kubectl has no words for."""
        config = json.loads((self.root / "kubeconfig").read_text())
        asked = urllib.request.Request(
            config["clusters"][0]["cluster"]["server"] + path, json.dumps(body).encode(),
            {"Authorization": f"Bearer {config['users'][0]['user']['token']}",
             "Content-Type": kind}, method=method,
        )  # fmt: skip
        with urllib.request.urlopen(asked, timeout=20, context=ssl._create_unverified_context()):
            pass

    def clear(self) -> None:
        """Delete all that tests have made but the volumes, and wait until no pod is left."""
        kinds = "jobs,pods,services,configmaps,secrets,pvc"
        self.kubectl("delete", kinds, "-l", "perdure.dev/job", "--grace-period=1", timeout_s=120)
        self.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", timeout_s=120)
        self.wait(lambda: not self.get("pods")["items"], "end of all pods")

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
        until = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except (AssertionError, OSError, subprocess.TimeoutExpired, LookupError):
                pass
            if time.monotonic() > until:
                raise AssertionError(f"no {what} after {timeout_s:g} s\n{self.read_logs()}")
            time.sleep(0.2)

    def read_logs(self) -> str:
        """Return the last lines of every daemon."""
        machines = (self.first, self.second)
        return "".join(machine.read_logs() for machine in machines if machine is not None)


def list_mounts() -> tuple[str, ...]:
    """Return the folders of this machine that a pod needs to run this very perdure."""
    python = Path(sys.executable).resolve().parents[1]
    found: list[str] = ["/usr", str(REPOSITORY)]
    for folder in (str(python), sys.prefix):
        if not any(f"{folder}/".startswith(f"{above}/") for above in found):
            found.append(folder)
    return tuple(found)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def main(words: Sequence[str]) -> None:
    """Run a cluster until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="perdure-k8s-") as folder:
        cluster = Kubernetes(Path(folder))
        try:
            cluster.start()
            print(
                f"export KUBECONFIG={cluster.env['KUBECONFIG']}  # image {cluster.image}",
                flush=True,
            )
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass
        finally:
            cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
