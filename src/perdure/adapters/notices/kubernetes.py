"""Kubernetes: the node of this pod, marked by what takes nodes away before it does; a job's pods.

Autoscalers and the clouds' termination handlers taint a node first, `kubectl drain` cordons it;
only then are its pods told to go, with no more than their grace. The pod needs a service account
that may read nodes; one that may read pods and events as well has a job know what its pods died of.
"""

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from perdure.adapters.notices.http import TIMEOUT_S, MetadataService, Source
from perdure.model.errors import PlatformError
from perdure.model.events import Announced

T = TypeVar("T")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its token, which is replaced every hour, and the server's authority."""
_GOING = {
    "ToBeDeletedByClusterAutoscaler": "the autoscaler takes the node away",
    "cloud.google.com/impending-node-termination": "the node is terminated",
    "aws-node-termination-handler/spot-itn": "spot interruption",
    "aws-node-termination-handler/scheduled-maintenance": "scheduled maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination": "the group takes the node away",
    "karpenter.sh/disrupted": "Karpenter takes the node away",
    "karpenter.sh/disruption": "Karpenter takes the node away",
    "node.kubernetes.io/out-of-service": "the node is out of service",
}
_RISK = {
    "DeletionCandidateOfClusterAutoscaler": "the autoscaler may take the node away",
    "aws-node-termination-handler/rebalance-recommendation": "rebalance recommendation",
    "node.kubernetes.io/unschedulable": "the node is cordoned",
}
"""Key of a taint -> in words."""


class _Taint(msgspec.Struct):
    key: str
    timeAdded: str = ""  # The API's name.


class _Spec(msgspec.Struct):
    taints: tuple[_Taint, ...] = ()


class _Node(msgspec.Struct):
    spec: _Spec


class ApiServer:
    """The server, as the service account of this pod is let in."""

    def __init__(self, env: Mapping[str, str], account: Path = ACCOUNT) -> None:
        """Ask the one that `env` names.

        Raises:
            PlatformError: its authority cannot be read.
        """
        host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        try:
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise PlatformError(f"{account / 'ca.crt'}: {error}") from error
        self._service = MetadataService(f"https://{host}:{port}", context)
        self._token = account / "token"

    async def get(self, path: str, right: str, type_: type[T]) -> T:
        """Return what is at `path`.

        Raises:
            PlatformError: the server cannot be reached, or the account lacks the `right`.
        """
        token = _read_account(self._token)
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        hint = f"the service account has to be allowed to {right}"
        answer = await self._service.ask(path, headers, timeout_s=2 * TIMEOUT_S, hint=hint)
        return self._service.parse(path, answer, type_)


def _read_account(path: Path) -> str:
    """Return what is in a file of the service account."""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise PlatformError(f"{path}: {error.strerror}") from error


class KubernetesPods:
    """The pods that have a label of the pod that this is, and what was said of them."""

    def __init__(self, env: Mapping[str, str], label: str, account: Path = ACCOUNT) -> None:
        """Ask about pods with the value of `label` that the pod of `env` has.

        Raises:
            PlatformError: the service account's files cannot be read.
        """
        self.own, self._label, self._selector = env.get("PERDURE_POD_NAME", ""), label, ""
        self._server = ApiServer(env, account)
        self._path = f"/api/v1/namespaces/{_read_account(account / 'namespace')}"

    async def read(self) -> Sequence[Any]:
        """Return the pods, this one among them.

        Raises:
            PlatformError: the server cannot be reached, or does not let this pod read pods.
        """
        if not self._selector:
            own = await self._get(f"/pods/{self.own}", "get pods")
            value = own["metadata"].get("labels", {}).get(self._label, "")
            self._selector = quote(f"{self._label}={value}")
        found = await self._get(f"/pods?labelSelector={self._selector}", "list pods")
        return tuple(found["items"])

    async def read_events(self, pod: str) -> Sequence[Any]:
        """Return what the server has said of one pod in the last hour or so.

        Raises:
            PlatformError: as `read`.
        """
        selector = quote(f"involvedObject.name={pod}")
        found = await self._get(f"/events?fieldSelector={selector}", "list events")
        return tuple(found["items"])

    async def _get(self, path: str, right: str) -> Any:
        return await self._server.get(f"{self._path}{path}", right, dict[str, Any])


class KubernetesNode(Source):
    """Taints of the node that this pod is on; nobody acknowledges one, which is the scheduler's."""

    name = "kubernetes"

    def __init__(self, env: Mapping[str, str], account: Path = ACCOUNT) -> None:
        """Ask the API server that `env` names about the node that it names.

        Raises:
            PlatformError: the authority of the server cannot be read.
        """
        self._server = ApiServer(env, account)
        self._path = f"/api/v1/nodes/{env['PERDURE_NODE_NAME']}"
        grace = env.get("PERDURE_POD_GRACE_S", "")
        self._grace_s = float(grace) if grace else None

    async def read(self) -> tuple[Announced, ...]:
        """Return what the node's taints announce."""
        taints = (await self._server.get(self._path, "get nodes", _Node)).spec.taints
        known = _GOING | _RISK
        return tuple(
            Announced(
                id=f"{taint.key} {taint.timeAdded}".strip(),
                reason=known[taint.key],
                grace_s=self._grace_s,
                certain=taint.key in _GOING,
                waits=True,
            )
            for taint in taints
            if taint.key in known
        )


def is_pod(env: Mapping[str, str], account: Path = ACCOUNT) -> bool:
    """Return whether this is a pod that knows its node and has a service account."""
    return (
        "KUBERNETES_SERVICE_HOST" in env
        and bool(env.get("PERDURE_NODE_NAME"))
        and (account / "token").exists()
    )
