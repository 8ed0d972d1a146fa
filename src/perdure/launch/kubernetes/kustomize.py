"""A job's manifests as a base for kustomize, with the account that its pods have and its rights.

Controller and nats-server are processes of the job's first pod, so that nothing else has to be
deployed. The volume is a base of its own: what deletes the job, or prunes what a repository no
longer has, never takes the checkpoints along.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.launch.kubernetes import CLAIM, JOB, complete, dump
from perdure.launch.kubernetes.project import pack
from perdure.model.errors import ConfigError
from perdure.model.platforms.kubernetes import NODE_RIGHTS, POD_RIGHTS, KubernetesSection, Right
from perdure.model.platforms.launching import Plan

KUSTOMIZATION, ACCOUNT, NODES, VOLUME = "kustomization.yaml", "account.yaml", "nodes.yaml", "volume"
_RBAC = "rbac.authorization.k8s.io/v1"
Document = dict[str, Any]


def make_base(plan: Plan) -> dict[str, str]:
    """Return path -> content of a base for the job of a plan.

    Raises:
        ConfigError: the plan is for no cluster, or says no namespace in which an account could be.
    """
    if plan.kind != "kubernetes":
        raise ConfigError(
            f"--kustomize is for a profile of kind kubernetes, and {plan.profile.platform} is "
            f"{plan.kind}",
            hint="--out DIR",
        )
    section, project = plan.profile.kubernetes, plan.settings["project"]
    packed = pack(Path(project), plan.settings["exclude"]) if project else b""
    files = {JOB: complete(plan.files[JOB], "", packed)}
    if section.service_account:
        if not section.namespace:
            raise ConfigError(
                "kubernetes.namespace is not set: the binding of kubernetes.service_account "
                "names it",
                hint='kubernetes.namespace = "train"',
            )
        files = {
            ACCOUNT: dump(make_account(section)),
            NODES: dump(make_node_reader(section)),
            **files,
        }
    base = {KUSTOMIZATION: render_kustomization(list(files), section), **files}
    if CLAIM in plan.files:
        base |= {
            f"{VOLUME}/{KUSTOMIZATION}": render_kustomization([CLAIM], section),
            f"{VOLUME}/{CLAIM}": plan.files[CLAIM],
        }
    return base


def render_kustomization(resources: Sequence[str], section: KubernetesSection) -> str:
    """Return the file that names the parts of a base."""
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    place = {"namespace": section.namespace} if section.namespace else {}
    return dump([{**head, **place, "resources": list(resources)}])


def make_account(section: KubernetesSection) -> list[Document]:
    """Return the service account of a job's pods, and its rights in their namespace."""
    name, place = section.service_account, section.namespace
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _name(name, place)},
        _make_role("Role", _name(name, place), POD_RIGHTS),
        _bind("Role", _name(name, place), name, section),
    ]


def make_node_reader(section: KubernetesSection) -> list[Document]:
    """Return the right of a job's pods to look at nodes, which only an administrator can give."""
    name = f"{section.namespace}-{section.service_account}-nodes"
    return [
        _make_role("ClusterRole", {"name": name}, NODE_RIGHTS),
        _bind("ClusterRole", {"name": name}, name, section),
    ]


def _name(name: str, namespace: str) -> dict[str, str]:
    return {"name": name, "namespace": namespace}


def _make_role(kind: str, metadata: dict[str, str], rights: Sequence[Right]) -> Document:
    rules = [
        {"apiGroups": [""], "resources": [right.resource], "verbs": list(right.verbs)}
        for right in rights
    ]
    return {"apiVersion": _RBAC, "kind": kind, "metadata": metadata, "rules": rules}


def _bind(kind: str, metadata: dict[str, str], role: str, section: KubernetesSection) -> Document:
    account = {"kind": "ServiceAccount", **_name(section.service_account, section.namespace)}
    return {
        "apiVersion": _RBAC,
        "kind": f"{kind}Binding",
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [account],
    }
