"""What perdure asks of kubectl, and what it makes of the answers: against a kubectl of a file."""

import base64
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from perdure.launch import kubernetes as platform
from perdure.launch.catalog import load_profile
from perdure.launch.exchange import UnfinishedError
from perdure.launch.kubernetes import client
from perdure.launch.kubernetes.project import LIMIT, PACKED, unpack
from perdure.launch.platforms import Here
from perdure.launch.records import read_record
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.launching import LaunchRecord, Plan

FAKE = Path(__file__).with_name("fake_kubectl.py")


HERE = Here(home="/nowhere", environ={}, tell=lambda line: None)
RUNNING = {
    "metadata": {"name": "gpt-0-abc", "labels": {"job-name": "gpt"},
                 "annotations": {"batch.kubernetes.io/job-completion-index": "0"}},
    "status": {"phase": "Running"},
}  # fmt: skip
JOB = {"metadata": {"name": "gpt"}, "spec": {"parallelism": 1}, "status": {}}
Cluster = Callable[..., Callable[[], Any]]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(home=str(tmp_path / "home"), environ={}, tell=lambda line: None)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Returns what sets the cluster's state up, which returns what reads it again."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    shutil.copy(FAKE, program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = tmp_path / "cluster.json"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(path))
    monkeypatch.setattr(platform, "_AGAIN_S", 0.0)

    def start(**state: Any) -> Callable[[], Any]:
        path.write_text(json.dumps({"version": "v1.31.2", **state}))
        return lambda: json.loads(path.read_text())

    return start


def plan(nodes: int = 1, sent: str = "/p", **section: Any) -> Plan:
    found = load_profile("kubernetes", "/nowhere").profile
    given = {"image": "r.example/t@sha256:" + "0" * 64, "project": "/workspace"} | section
    launch = LaunchConfig(project=sent, gpus=2, secrets=("HF_TOKEN",) if "secret" in given else ())
    spec = JobSpec(name="gpt", script="train.py", nodes=nodes, launch=launch)
    return platform.render(spec, structs.replace(found, kubernetes=KubernetesSection(**given)))


def record(**section: Any) -> LaunchRecord:
    made = plan(**section)
    return LaunchRecord(
        job="gpt", profile=made.profile, place=made.place, id="gpt", python="python3",
        home="/checkpoints/state", launched_s=0.0,
    )  # fmt: skip


def test_a_launch_creates_claim_and_job_with_its_own_number(cluster: Cluster, here: Here) -> None:
    read = cluster()
    made = platform.submit(plan(context="lab", namespace="train"), here)
    claim, job = read()["created"]
    assert yaml.safe_load(claim)["kind"] == "PersistentVolumeClaim"
    kinds = {one["kind"]: one for one in yaml.safe_load_all(job)}
    assert set(kinds) == {"ConfigMap", "Service", "Job"}
    assert kinds["ConfigMap"]["data"]["launch"] == f"{made.launched_s:.0f}"
    assert made.id == "gpt"
    for words, _ in read()["calls"]:
        assert words[:2] == ["--context=lab", "--namespace=train"]
        limit = "300s" if "delete" in words else "15s"
        assert f"--request-timeout={limit}" in words


def test_a_project_is_sent_with_the_job(cluster: Cluster, here: Here, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    read = cluster()
    platform.submit(plan(sent=str(project), project=""), here)
    (job,) = read()["created"][1:]
    (config,) = (one for one in yaml.safe_load_all(job) if one["kind"] == "ConfigMap")
    unpack(base64.b64decode(config["binaryData"][PACKED]), tmp_path / "there")
    assert (tmp_path / "there" / "train.py").read_text() == "print(1)\n"
    document = json.loads(config["data"]["job.json"])
    assert document["cwd"] == "/checkpoints/launched/gpt/project"


def test_a_project_that_is_too_large_is_refused_before_anything_is_deleted(
    cluster: Cluster, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(LIMIT + 1000))
    read = cluster()
    with pytest.raises(ConfigError, match="too much for a ConfigMap"):
        platform.submit(plan(sent=str(tmp_path), project=""), here)
    assert not [words for words, _ in read()["calls"] if "delete" in words]


def test_a_claim_that_is_there_is_kept(cluster: Cluster, here: Here) -> None:
    read = cluster(pvc={"spec": {"accessModes": ["ReadWriteOnce"]}})
    platform.submit(plan(), here)
    assert len(read()["created"]) == 1
    deleted = [stdin for words, stdin in read()["calls"] if {"delete", "-f"} <= set(words)]
    assert len(deleted) == 1
    assert "PersistentVolumeClaim" not in deleted[0]


def test_a_job_that_runs_is_not_created_twice(cluster: Cluster, here: Here) -> None:
    read = cluster(job=JOB, pods=[RUNNING])
    with pytest.raises(ConfigError, match="is there: running"):
        platform.submit(plan(), here)
    assert "created" not in read()


def test_a_launch_that_broke_off_is_remembered(cluster: Cluster, here: Here) -> None:
    cluster(refuses="error: lost connection to server", pvc=JOB)
    with pytest.raises(PlatformError, match="lost connection"):
        platform.submit(plan(), here)
    found = read_record(here.home, "gpt")
    assert found is not None
    assert found.id == "gpt"


def test_a_reader_that_cannot_be_deleted_undoes_nothing(cluster: Cluster) -> None:
    done = {**JOB, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    cluster(job=done, pods=[], pod={"status": {"phase": "Running"}}, keeps="Forbidden")
    told: list[str] = []
    assert platform.run(record(), ["report", "gpt"], Here("/nowhere", {}, told.append)) == 0
    # If the locale is not installed, bash warns before the message.
    assert "is left (" in told[-1]
    assert "Forbidden): it ends by itself within a day" in told[-1]


def test_the_command_that_forwards_a_port_names_the_pod(cluster: Cluster) -> None:
    cluster(job=JOB, pods=[RUNNING])
    command = platform.render_forward(record(), [8080, 6006])
    assert command[-4:] == ["port-forward", "pod/gpt-0-abc", "8080", "6006"]
    cluster(job=JOB, pods=[])
    with pytest.raises(PlatformError, match="no pod of job `gpt` runs"):
        platform.render_forward(record(), [8080])


def test_what_the_server_refuses_is_an_error(cluster: Cluster, here: Here) -> None:
    cluster(refuses='The Job "gpt" is invalid: spec: Required value')
    with pytest.raises(PlatformError, match="Required value"):
        platform.submit(plan(), here)
    _, found = platform.check(plan(), HERE)
    assert [f.level for f in found if "Required value" in f.text] == ["error", "error"]


def test_the_place_is_checked_for_what_the_manifests_refer_to(cluster: Cluster) -> None:
    good = [{"status": {"allocatable": {"nvidia.com/gpu": "2"}}}]
    cluster(nodes=good, secrets={"tokens": ["HF_TOKEN"]})
    assert platform.check(plan(secret="tokens"), HERE) == ({}, ())
    cluster(version="v1.25.3", secrets={"tokens": ["OTHER"]},
            pvc={"spec": {"accessModes": ["ReadWriteOnce"]}})  # fmt: skip
    _, found = platform.check(plan(2, secret="tokens"), HERE)
    assert [(f.level, f.trap) for f in found] == [
        ("error", ""), ("error", "K8S4"), ("error", "U34"), ("warning", "K8S1"),
    ]  # fmt: skip


def test_states_by_the_server_and_what_says_nothing_of_the_job(cluster: Cluster) -> None:
    cluster(job=JOB, pods=[RUNNING])
    assert platform.query_state(record(), HERE).state == "running"
    cluster()
    gone = platform.query_state(record(), HERE)
    assert (gone.state, gone.reason.split(":")[0]) == ("killed", "cancelled")
    cluster(unreachable="Unable to connect to the server: dial tcp: connection refused")
    with pytest.raises(PlatformError, match="connection refused"):
        platform.query_state(record(), HERE)


def test_a_jobset_is_as_the_job_that_it_has_made(cluster: Cluster) -> None:
    kinds = {one["kind"]: one for one in
             yaml.safe_load_all(plan(shape="jobset").files["job.yaml"])}  # fmt: skip
    (made,) = kinds["JobSet"]["spec"]["replicatedJobs"]
    assert made["template"]["metadata"]["labels"]["perdure.dev/job"] == "gpt"
    read = cluster(jobs=[JOB], pods=[RUNNING])
    assert platform.query_state(record(shape="jobset"), HERE).state == "running"
    asked = [words for words, _ in read()["calls"] if "jobs" in words]
    assert "perdure.dev/job=gpt" in asked[0]
    cluster(jobset={"kind": "JobSet"})  # Just created: its controller has not come to it.
    assert platform.query_state(record(shape="jobset"), HERE).state == "waiting"
    cluster()
    assert platform.query_state(record(shape="jobset"), HERE).state == "killed"


def test_a_pytorchjob_is_as_its_own_conditions_and_pods(cluster: Cluster) -> None:
    def look(*conditions: Any, **given: Any) -> Any:
        document = {
            "metadata": {"name": "gpt"},
            "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}},
            "status": {"conditions": list(conditions)},
        }
        document["spec"] |= given.pop("spec", {})
        cluster(pytorchjob=document, **given)
        return platform.query_state(record(shape="pytorchjob"), HERE)

    def pod(role: str, index: int, phase: str = "Running") -> dict[str, Any]:
        labels = {"training.kubeflow.org/replica-type": role,
                  "training.kubeflow.org/replica-index": str(index)}  # fmt: skip
        return {"metadata": {"name": f"gpt-{role}-{index}", "labels": labels},
                "status": {"phase": phase}}  # fmt: skip

    created = {"type": "Created", "status": "True"}
    assert look(created).state == "waiting"
    workers = [pod("worker", 0), pod("worker", 1)]
    # A worker numbered 0 is not the first pod: nobody is asked there.
    assert look(created, pods=workers).state == "waiting"
    both = look(created, pods=[*workers, pod("master", 0)])
    assert (both.state, both.reason) == ("running", "in pod gpt-master-0")
    assert look(created, {"type": "Succeeded", "status": "True"}).state == "ended"
    failed = {"type": "Failed", "status": "True", "reason": "PyTorchJobFailed"}
    ended = pod("master", 0, "Failed")
    ended["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 7}}}]
    over = look(failed, pods=[ended])
    assert (over.state, over.code) == ("ended", 7)
    assert "suspended" in look(created, spec={"runPolicy": {"suspend": True}}).reason
    cluster()
    assert platform.query_state(record(shape="pytorchjob"), HERE).state == "killed"


def test_what_a_pod_waits_for_is_asked_of_its_events(cluster: Cluster) -> None:
    waiting = {"metadata": {"name": "p", "labels": {}}, "status": {"phase": "Pending"}}
    event = {"involvedObject": {"name": "p"}, "reason": "FailedAttachVolume",
             "message": "Multi-Attach error for volume"}  # fmt: skip
    cluster(job=JOB, pods=[waiting], events=[event])
    state = platform.query_state(record(), HERE)
    assert state.state == "not-started"  # It was launched in 1970.
    assert "[K8S4]" in state.reason


def test_a_command_is_run_in_the_first_pod(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster(job=JOB, pods=[RUNNING], code=3)
    assert platform.run(record(), ["status", "gpt", "--json"], HERE) == 3
    said = capfd.readouterr().out
    assert said.startswith("exec gpt-0-abc -c perdure")
    assert "PERDURE_HOME=/checkpoints/state python3 -P -m perdure status gpt" in said


@pytest.mark.parametrize(("words", "times"), [(("status", "gpt"), 2), (("set", "gpt", "a=1"), 1)])
def test_a_question_that_dies_with_its_pod_is_asked_once_more_and_an_order_is_not(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], times: int
) -> None:
    cluster(job=JOB, pods=[RUNNING], code=137)
    assert platform.run(record(), words, HERE) == 137
    assert capfd.readouterr().out.count("exec gpt-0-abc") == times


def test_of_a_job_that_is_over_a_command_is_run_beside_its_volume(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    done = {**JOB, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    read = cluster(job=done, pods=[], pod={"status": {"phase": "Running"}})
    assert platform.run(record(host_paths=("/opt/envs",)), ["report", "gpt"], HERE) == 0
    (reader,) = (yaml.safe_load(one) for one in read()["created"])
    name = reader["metadata"]["name"]
    assert f"exec {name} -c perdure env" in capfd.readouterr().out
    assert "perdure.dev/job" not in reader["metadata"]["labels"]  # It is no pod of the job.
    volumes = reader["spec"]["volumes"]
    assert [v["name"] for v in volumes] == ["durable", "host-0"]
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == "gpt-durable"
    assert ["delete", "pod", name] == [w for w in read()["calls"][-1][0] if w[:2] != "--"]


def test_the_log_of_a_pod_that_ended_and_of_its_last_life(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = {"metadata": {"name": "old"}, "status": {"phase": "Failed"}}
    cluster(job=JOB, pods=[failed])
    assert platform.run(record(), ["logs", "gpt"], HERE) == 0
    assert capfd.readouterr().out == "logs old -c perdure\n"
    looping = {"metadata": {"name": "p"}, "status": {"phase": "Running", "containerStatuses": [
        {"restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}}  # fmt: skip
    read = cluster(job=JOB, pods=[looping])
    assert platform.run(record(), ["logs", "gpt"], HERE) == 0
    assert "--previous" in read()["calls"][-1][0]
    with pytest.raises(PlatformError, match="no pod"):
        platform.run(record(), ["status", "gpt", "--devices"], HERE)


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_logs_that_hang_are_waited_for_no_longer_than_they_may_be_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    cluster(job=JOB, pods=[{**RUNNING, "status": {"phase": phase}}], hangs_s=3600)
    monkeypatch.setattr(platform, "SILENCE_S", 0.5)
    with pytest.raises(UnfinishedError, match="kubectl says nothing, and does not end"):
        platform.run(record(), ["logs", "gpt"], HERE)


def test_no_answer_is_waited_for_so_long_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(sleep_s=3600)
    monkeypatch.setattr(client, "TIMEOUT_S", 0.5)
    with pytest.raises(PlatformError, match="no answer"):
        platform.query_state(record(), HERE)


def test_without_kubectl_there_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match="no kubectl"):
        platform.query_state(record(), HERE)


def test_what_cannot_be_deleted_is_said_with_what_its_caller_would_have_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'no such right' >&2; exit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(PlatformError, match="kubectl delete: no such right") as caught:
        client.Client(KubernetesSection()).delete("job", "a", hint="kubectl get jobs,pods")
    assert caught.value.hint == "kubectl get jobs,pods"
