"""The one door to a cluster: kubectl, each call with a bounded time.

kubectl and not a client library: it brings the person's own contexts and login plugins, starts in
a fifth of a second, and every call can be repeated by hand. A question that was not answered says
nothing about the job.
"""

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from perdure.launch.channel import Channel, wrap
from perdure.launch.exchange import UnreachedError, last_line, run_bounded
from perdure.launch.kubernetes.manifest import CONTAINER, CONTAINERS, make_reader
from perdure.launch.platforms import Here
from perdure.model.errors import PlatformError
from perdure.model.platforms.kubernetes import (
    JOB_LABEL,
    KubernetesSection,
    explain_job,
    explain_pod,
    read_pytorchjob,
)
from perdure.model.platforms.launching import LaunchRecord, PulledFile
from perdure.model.platforms.outcome import PodOutcome

Object = Mapping[str, Any]
REQUEST_S = 15
TIMEOUT_S = 30.0
DELETE_S = 300.0


class Client:
    """kubectl with a context and a namespace."""

    def __init__(self, section: KubernetesSection) -> None:
        """Talk to the cluster of a profile."""
        self.shape = section.shape
        where = {"--context": section.context, "--namespace": section.namespace}
        self._words = ["kubectl", *(f"{name}={value}" for name, value in where.items() if value)]

    def command(self, *words: str) -> tuple[str, ...]:
        """Return a command line, as a person would type it."""
        return (*self._words, *words)

    def call(
        self, *words: str, stdin: str | None = None, timeout_s: float | None = None
    ) -> tuple[int, str, str]:
        """Run kubectl; return exit code, output and errors.

        Raises:
            PlatformError: it is not installed, says too much, or there was no answer in time.
        """
        # A wait for pods to go is one long request.
        request_s = REQUEST_S if timeout_s is None else int(timeout_s)
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        command = self.command(f"--request-timeout={request_s}s", *words)
        try:
            done = run_bounded(
                command, name="kubectl", stdin=(stdin or "").encode(), timeout_s=timeout_s
            )
        except FileNotFoundError as error:
            raise PlatformError(
                "no kubectl here", hint="install it; kubectl config view"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UnreachedError(
                f"kubectl {words[0]}: no answer in {timeout_s:g} s",
                hint="kubectl cluster-info says",
            ) from error
        out, err = (said.decode(errors="replace") for said in (done.stdout, done.stderr))
        return done.returncode, out, err.strip()

    def get(self, *words: str) -> Object | None:
        """Return an object or a list of objects; None where it does not exist.

        Raises:
            UnreachedError: nobody answered, or it may not be read.
        """
        code, out, err = self.call("get", *words, "-o", "json")
        if code and "NotFound" in err:
            return None
        if code:
            raise UnreachedError(
                f"kubectl get {words[0]}: {last_line(err)}",
                hint="ask again: this says nothing of the job",
            )
        return cast(Object, json.loads(out))

    def read_version(self) -> str:
        """Return the server's version, such as `v1.31.2`."""
        code, out, err = self.call("version", "-o", "json")
        try:
            return str(json.loads(out)["serverVersion"]["gitVersion"])
        except (ValueError, KeyError) as error:
            raise PlatformError(
                f"kubectl version: {last_line(err, f'exit code {code}')}",
                hint="kubectl cluster-info says",
            ) from error

    def find_refusal(self, manifest: str) -> str:
        """Return why the server would refuse a manifest; empty where it would take it."""
        code, _, err = self.call(
            "create", "--dry-run=server", "-o", "name", "-f", "-", stdin=manifest
        )
        refused = (
            line
            for line in err.splitlines()
            if "AlreadyExists" not in line and not line.startswith("Warning:")
        )
        return "; ".join(refused) if code else ""

    def list_secret_keys(self, name: str) -> set[str] | None:
        """Return the keys of a Secret, never its values; None where it does not exist."""
        template = "{{range $key, $value := .data}}{{$key}} {{end}}"
        code, out, err = self.call("get", "secret", name, "-o", f"go-template={template}")
        if code and "NotFound" not in err:
            raise PlatformError(f"kubectl get secret: {last_line(err)}", hint="may you read it?")
        return None if code else set(out.split())

    def create(self, manifest: str) -> None:
        """Create the objects of a manifest.

        Raises:
            PlatformError: the server refuses one; the message has its reason.
        """
        self.act(
            "create", "-f", "-", stdin=manifest, hint="perdure launch --dry-run --out DIR has it"
        )

    def act(
        self, *words: str, stdin: str | None = None, timeout_s: float | None = None, hint: str
    ) -> None:
        """Have the server do something.

        Raises:
            PlatformError: it does not; the message has its reason.
        """
        code, _, err = self.call(*words, stdin=stdin, timeout_s=timeout_s)
        if code:
            raise PlatformError(f"kubectl {words[0]}: {last_line(err)}", hint=hint)

    def delete(self, *words: str, stdin: str | None = None, hint: str = "kubectl get pods") -> None:
        """Delete the objects that `words` name, and wait until their pods are gone.

        Raises:
            PlatformError: they cannot be deleted, or a pod does not go.
        """
        how = ("delete", "--ignore-not-found", "--cascade=foreground", "--wait")
        self.act(*how, *words, stdin=stdin, timeout_s=DELETE_S, hint=hint)

    def look(self, name: str) -> tuple[PodOutcome, Sequence[Object]]:
        """Return how the job `name` is, and its pods.

        Raises:
            PlatformError: nobody answered.
        """
        label = f"{JOB_LABEL}={name}"
        job = self.get("job", name) if self.shape == "job" else self._find_job(name, label)
        pods = self.get_all("pods", "-l", label)
        pending = any(pod.get("status", {}).get("phase") == "Pending" for pod in pods)
        return explain_job(job, pods, self.list_events("Pod") if pending else {}), pods

    def get_all(self, *words: str) -> Sequence[Object]:
        """Return the objects of a kind; none where there are none."""
        return cast(Sequence[Object], (self.get(*words) or {}).get("items", ()))

    def list_events(self, kind: str, name: str = "") -> dict[str, list[str]]:
        """Return what was said of objects of a kind, or of one: name -> lines, the newest last."""
        one = f",involvedObject.name={name}" if name else ""
        selected = f"--field-selector=involvedObject.kind={kind}{one}"
        said: dict[str, list[str]] = {}
        for event in self.get_all("events", selected, "--sort-by=.lastTimestamp"):
            told = f"{event.get('reason', '')} {event.get('message', '')}"
            said.setdefault(event.get("involvedObject", {}).get("name", ""), []).append(told)
        return said

    def _find_job(self, name: str, label: str) -> Object | None:
        """Return the Job that a JobSet or TrainJob has made, an empty one before it has.

        A PyTorchJob makes none: its pods are its own.
        """
        if self.shape == "pytorchjob":
            found = self.get(self.shape, name)
            return None if found is None else read_pytorchjob(found)
        if jobs := self.get_all("jobs", "-l", label):
            return jobs[0]
        owner = self.get(self.shape, name)
        return None if owner is None else {"metadata": {"name": name}}


_START_S = 300.0


class PodChannel(Channel):
    """How commands get into one container; like those to a box, but by `kubectl exec`."""

    def __init__(self, client: Client, pod: str, container: str, python: str) -> None:
        """Connect to nothing yet."""
        self.host, self.python = "", python
        self._client, self._pod, self._container = client, pod, container

    @property
    def name(self) -> str:
        """What the place is called to a person."""
        return f"pod {self._pod}"

    def enter(self, *words: str, stdin: bool = True) -> list[str]:
        """Return the command of this machine that runs `words` in the container."""
        options = ["-i"] if stdin else []
        target = (*options, self._pod, "-c", self._container)
        return list(self._client.command("exec", *target, "--", *words))

    def command(self, script: str, *, shared: bool = False) -> list[str]:
        """Return the command of this machine that runs the shell script `script` there."""
        return self.enter("sh", "-c", wrap(script))

    def bring(
        self,
        source: str,
        target: Path,
        files: Sequence[PulledFile],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Bring `files`, named relative to the absolute folder `source` there, into `target`."""
        from perdure.launch.kubernetes.fetching import fetch  # Which goes over a channel.

        fetch(self, source, target, files, tell=tell)

    def disconnect(self) -> None:
        """Do nothing: each command has a connection of its own."""

    def _try(self) -> list[str]:
        return list(self._client.command("get", "pod", self._pod))


@contextmanager
def open_pod(record: LaunchRecord, here: Here) -> Iterator[PodChannel]:
    """Yield a channel to a container that has the volume of a job.

    A pod that was made for it is deleted afterwards; where this machine dies meanwhile, it ends
    by itself after a day.

    Raises:
        PlatformError: the server does not answer, or the pod does not start.
    """
    section, client = record.profile.kubernetes, Client(record.profile.kubernetes)
    job, _ = client.look(record.id)
    if job.pod:
        yield PodChannel(client, job.pod, name_container(section), record.python)
        return
    name = f"{record.id}-reader-{secrets.token_hex(3)}"
    client.create(yaml.safe_dump(make_reader(record, name)))
    try:
        here.tell(f"pod {name} is made to read the volume")
        _wait_running(client, name)
        yield PodChannel(client, name, CONTAINER, record.python)
    finally:
        _delete(client, name, here)


def _delete(client: Client, name: str, here: Here) -> None:
    """Delete a reader; where it cannot be, that undoes nothing of what was read."""
    try:
        code, _, error = client.call("delete", "pod", name, "--ignore-not-found", "--wait=false")
    except PlatformError as lost:
        code, error = 1, str(lost)
    if code:
        here.tell(f"pod {name} is left ({error}): it ends by itself within a day")


def list_words(record: LaunchRecord, argv: Sequence[str]) -> list[str]:
    """Return the command that runs a perdure command line in a pod of a job."""
    return ["env", f"PERDURE_HOME={record.home}", record.python, "-P", "-m", "perdure", *argv]


def name_container(section: KubernetesSection) -> str:
    """Return the container of a job's pods in which perdure is."""
    return CONTAINERS.get(section.shape, CONTAINER)


def _wait_running(client: Client, name: str) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        pod = client.get("pod", name) or {}
        state = explain_pod(pod, client.list_events("Pod", name).get(name, ()))
        if state.state == "running":
            return
        if state.state != "waiting" or time.monotonic() > until_s:
            raise PlatformError(
                f"pod {name}, which was to read the volume: {state.state}: {state.reason}",
                hint=shlex.join(client.command("get", "pvc,pods")),
            )
        time.sleep(0.3)
