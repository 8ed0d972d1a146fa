"""A base for kustomize, and that the rights in it are those that the code asks for."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.launch.test_kubernetes import IMAGE
from tests.waiting import PATIENCE_S

from perdure.adapters.notices import kubernetes
from perdure.cli.app import run_command
from perdure.model.platforms.kubernetes import JOB_LABEL, NODE_RIGHTS, POD_RIGHTS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a job, its project, and profiles; it is the current one."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print(1)\n")
    (tmp_path / "job.toml").write_text(
        'name = "gpt"\nscript = "train.py"\n[launch]\nproject = "project"\n'
    )
    write_profile(tmp_path, namespace="train", service_account="perdure")
    return tmp_path


def write_profile(folder: Path, **section: Any) -> None:
    rows = [f"{key} = {json.dumps(value)}" for key, value in {"image": IMAGE, **section}.items()]
    lines = ['base = "kubernetes"', "[kubernetes]", *rows]
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")


def render(*words: str, on: str = "./cluster.toml") -> int:
    return run_command(["launch", "job.toml", "--on", on, "--dry-run", *words])


def read(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def list_asked() -> set[tuple[str, str]]:
    """Return verb and kind of all that perdure in a pod asks the server for."""
    asked: set[str] = set()

    class Server(kubernetes.ApiServer):
        def __init__(self, *args: Any) -> None:
            pass

        async def get(self, path: str, right: str, type_: Any) -> Any:
            asked.add(path)
            metadata = {"metadata": {"labels": {JOB_LABEL: "gpt"}}, "items": []}
            return kubernetes._Node(kubernetes._Spec()) if "/nodes/" in path else metadata

    async def ask(account: Path) -> None:
        env = {"PERDURE_POD_NAME": "gpt-0", "PERDURE_NODE_NAME": "n"}
        pods = kubernetes.KubernetesPods(env, JOB_LABEL, account)
        await pods.read()
        await pods.read_events("gpt-0")
        await kubernetes.KubernetesNode(env).read()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes, "ApiServer", Server)
        patch.setattr(kubernetes, "_read_account", lambda path: "train")
        asyncio.run(ask(Path("/nowhere")))
    found = set()
    for path in asked:
        match = re.fullmatch(r"/api/v1/(namespaces/train/)?(\w+)(/[\w-]+)?(\?.*)?", path)
        assert match is not None, path
        found.add(("get" if match[3] else "list", match[2]))
    return found


def test_each_right_is_used_and_none_is_missing() -> None:
    granted = {(verb, right.resource) for right in (*POD_RIGHTS, *NODE_RIGHTS)
               for verb in right.verbs}  # fmt: skip
    assert granted == list_asked()


def test_nothing_else_in_a_pod_asks_the_server() -> None:
    source = Path(kubernetes.__file__).resolve().parents[2]
    users = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "ApiServer(" in path.read_text() or "KUBERNETES_SERVICE_HOST" in path.read_text()
    }
    assert users == {"adapters/notices/kubernetes.py"}


def test_what_deletes_the_job_leaves_its_volume(home: Path) -> None:
    assert render("--kustomize", "base") == 0
    listed = read(home / "base" / "kustomization.yaml")[0]
    kinds = {one["kind"] for name in listed["resources"] for one in read(home / "base" / name)}
    assert kinds == {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding",
                     "ConfigMap", "Service", "Job"}  # fmt: skip
    volume = read(home / "base" / "volume" / "kustomization.yaml")[0]
    assert (volume["resources"], listed["namespace"]) == (["claim.yaml"], "train")
    (config,) = (one for one in read(home / "base" / "job.yaml") if one["kind"] == "ConfigMap")
    assert "project.tar.gz" in config["binaryData"]
    assert "launch" not in config["data"]


def test_the_roles_say_the_rights_and_bind_them_to_the_account_of_the_pods(home: Path) -> None:
    render("--kustomize", "base")
    role, binding = read(home / "base" / "account.yaml")[1:]
    cluster_role, cluster_binding = read(home / "base" / "nodes.yaml")
    for found, rights in ((role, POD_RIGHTS), (cluster_role, NODE_RIGHTS)):
        rules = {rule["resources"][0]: tuple(rule["verbs"]) for rule in found["rules"]}
        assert rules == {right.resource: right.verbs for right in rights}
        assert all(rule["apiGroups"] == [""] for rule in found["rules"])
    account = {"kind": "ServiceAccount", "name": "perdure", "namespace": "train"}
    assert binding["subjects"] == cluster_binding["subjects"] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (job,) = (one for one in read(home / "base" / "job.yaml") if one["kind"] == "Job")
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "perdure"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("shape", ["job", "jobset", "trainjob", "pytorchjob"])
def test_kustomize_builds_it(home: Path, shape: str) -> None:
    write_profile(home, namespace="train", service_account="perdure", shape=shape)
    render("--kustomize", "base")
    for folder in ("base", "base/volume"):
        done = subprocess.run(
            ["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        built = list(yaml.safe_load_all(done.stdout))
        listed = read(home / folder / "kustomization.yaml")[0]["resources"]
        plain = [one for name in listed for one in read(home / folder / name)]

        def name(one: Any) -> tuple[str, str]:
            return one["kind"], one["metadata"]["name"]

        assert sorted(built, key=name) == sorted(plain, key=name)


def test_without_an_account_there_are_no_rights(home: Path) -> None:
    write_profile(home)
    assert render("--kustomize", "base") == 0
    assert {path.name for path in (home / "base").iterdir()} == {
        "kustomization.yaml", "job.yaml", "volume"}  # fmt: skip
    write_profile(home, storage="", claim="shared")
    assert render("--kustomize", "other") == 0
    assert not (home / "other" / "volume").exists()


def test_bad_input_is_one_line_and_code_2(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_profile(home, service_account="perdure")
    for words, on, why in (
        (("--kustomize", "base"), "./cluster.toml", "kubernetes.namespace is not set"),
        (("--kustomize", "base"), "slurm", "--kustomize is for a profile of kind kubernetes"),
        (("--kustomize", "base", "--out", "o"), "./cluster.toml", "write different files"),
    ):
        assert render(*words, on=on) == 2
        lines = capfd.readouterr().err.splitlines()
        assert [line.split(":")[1] for line in lines if line.startswith("perdure: error")] == [
            " error"]  # fmt: skip
        assert why in lines[0]
    assert not (home / "base").exists()
