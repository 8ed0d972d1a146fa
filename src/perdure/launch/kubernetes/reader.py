"""A way into a job's volume: its first pod while that runs, else a pod made for the purpose."""

import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from perdure.launch.channel import Channel, wrap
from perdure.launch.kubernetes.client import Client
from perdure.launch.kubernetes.manifest import (
    CONTAINER,
    TRAINER_CONTAINER,
    make_reader,
)
from perdure.launch.platforms import Here
from perdure.model.errors import PlatformError
from perdure.model.platforms.kubernetes import KubernetesSection, explain_pod
from perdure.model.platforms.launching import LaunchRecord

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

    def command(self, script: str) -> list[str]:
        """Return the command of this machine that runs the shell script `script` there."""
        return self.enter("sh", "-c", wrap(script))

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
        yield PodChannel(client, job.pod, find_container(section), record.python)
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


def find_container(section: KubernetesSection) -> str:
    """Return the container of a job's pods in which perdure is."""
    return TRAINER_CONTAINER if section.shape == "trainjob" else CONTAINER


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
