"""Kubernetes without a cluster: the manifests, and what states of Jobs and pods mean."""

from typing import Any

import pytest
import yaml
from msgspec import structs

from perdure.launch.catalog import load_profile
from perdure.launch.kubernetes import check_claim, check_nodes, compare_version, judge, render
from perdure.launch.kubernetes.manifest import name_objects
from perdure.launch.kubernetes.pod import decide_code, read_pod_role
from perdure.model.errors import ConfigError
from perdure.model.job import CheckpointConfig, JobSpec, LaunchConfig
from perdure.model.platforms.kubernetes import (
    KubernetesSection,
    explain_job,
    explain_pod,
    parse_version,
)
from perdure.model.platforms.launching import Plan
from perdure.model.platforms.outcome import PodOutcome

IMAGE = "registry.example/train@sha256:" + "0" * 64


def make_plan(nodes: int = 1, gpus: int = 0, job: dict[str, Any] | None = None,
              **section: Any) -> Plan:  # fmt: skip
    found = load_profile("kubernetes", "/nowhere").profile
    profile = structs.replace(found, kubernetes=KubernetesSection(**{"image": IMAGE} | section))
    launch = LaunchConfig(project="/srv/proj", gpus=gpus, secrets=("HF_TOKEN",) if section.get(
        "secret") else ())  # fmt: skip
    given: dict[str, Any] = {"name": "gpt", "script": "train.py"} | (job or {})
    return render(JobSpec(nodes=nodes, launch=launch, **given), profile)


def documents(plan: Plan) -> dict[str, Any]:
    found = [one for text in plan.files.values() for one in yaml.safe_load_all(text)]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def find_pod(job: Any) -> Any:
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("shape", ["job", "jobset", "trainjob", "pytorchjob"])
@pytest.mark.parametrize("server", ["1.20", "1.22", "1.25", "1.31"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_no_error_is_found_by_default(shape: Any, server: str, nodes: int) -> None:
    plan = make_plan(nodes, gpus=2, shape=shape, server=server, secret="tokens", memory="64Gi")
    assert [f for f in plan.findings if f.level == "error"] == []
    assert {f.trap for f in plan.findings} <= {"GEN1", ""}


def test_folders_of_the_node_are_mounted_read_only_where_they_are() -> None:
    plan = make_plan(host_paths=("/opt/envs",))
    pod = find_pod(documents(plan)["Job/gpt"])
    assert {"name": "host-0", "mountPath": "/opt/envs", "readOnly": True} in pod["containers"][0][
        "volumeMounts"]  # fmt: skip
    assert pod["volumes"][-1]["hostPath"]["path"] == "/opt/envs"
    assert [f for f in plan.findings if f.level == "error"] == []


def test_a_job_is_indexed_where_the_server_knows_that_and_else_two() -> None:
    one = documents(make_plan(3))["Job/gpt"]["spec"]
    assert (one["completionMode"], one["completions"], one["parallelism"]) == ("Indexed", 3, 3)
    old = documents(make_plan(3, server="1.21"))
    first, rest = old["Job/gpt"]["spec"], old["Job/gpt-nodes"]["spec"]
    assert (first["completions"], rest["completions"]) == (1, 2)
    assert "completionMode" not in first
    roles = [{e["name"]: e.get("value") for e in find_pod({"spec": job})["containers"][0]["env"]}
             for job in (first, rest)]  # fmt: skip
    assert [env["PERDURE_POD_ROLE"] for env in roles] == ["first", "node"]


def test_a_preemption_is_no_failure_where_the_server_can_tell() -> None:
    rules = documents(make_plan())["Job/gpt"]["spec"]["podFailurePolicy"]["rules"]
    ignored = [rule for rule in rules if rule["action"] == "Ignore"]
    assert ignored[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert ignored[1]["onExitCodes"]["values"] == [143]
    # Without the empty list the schema of these servers refuses the rule.
    older = documents(make_plan(server="1.28"))["Job/gpt"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["onPodConditions"] for rule in older[1:]] == [[], []]
    assert "podFailurePolicy" not in documents(make_plan(server="1.25"))["Job/gpt"]["spec"]
    in_place = make_plan(restart_policy="OnFailure")
    assert "podFailurePolicy" not in documents(in_place)["Job/gpt"]["spec"]
    assert any("count as failures" in f.text for f in in_place.findings)


def test_gpus_are_limits_only_and_secrets_references_only() -> None:
    plan = make_plan(gpus=4, secret="tokens")
    box = find_pod(documents(plan)["Job/gpt"])["containers"][0]
    assert box["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "nvidia.com/gpu" not in box["resources"]["requests"]
    reference = {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in box["env"]
    spec = JobSpec(script="t.py", launch=LaunchConfig(project="/p", secrets=("HF_TOKEN",)))
    without = structs.replace(plan.profile, kubernetes=KubernetesSection(image=IMAGE))
    with pytest.raises(ConfigError, match="names no Secret"):
        render(spec, without)


def test_several_nodes_share_a_claim_that_outlives_the_job() -> None:
    plan = make_plan(2)
    assert "PersistentVolumeClaim" not in plan.files["job.yaml"]
    assert yaml.safe_load(plan.files["claim.yaml"])["spec"]["accessModes"] == ["ReadWriteMany"]
    config = documents(plan)["ConfigMap/gpt"]["data"]["job.json"]
    job = yaml.safe_load(config)
    assert (job["remote"], job["cwd"]) == (1, "/checkpoints/launched/gpt/project")
    assert job["checkpoint"]["url"].startswith("/checkpoints/")
    alone = yaml.safe_load(make_plan(1).files["claim.yaml"])
    assert alone["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize(
    ("changes", "trap"),
    [
        ({"nodes": 2, "access_mode": "ReadWriteOnce"}, "K8S4"),
        ({"grace_s": 30, "checkpoint_s": 30}, ""),
        ({"job": {"checkpoint": CheckpointConfig(url="/data/x")}}, "K8S5"),
        ({"memory": "10GB"}, ""),
    ],
)
def test_what_cannot_train_is_an_error(changes: dict[str, Any], trap: str) -> None:
    errors = [f.trap for f in make_plan(**changes).findings if f.level == "error"]
    assert trap in errors


def test_an_image_by_tag_is_told_of_and_none_is_refused() -> None:
    assert "U30" in {f.trap for f in make_plan(image="train:latest").findings}
    with pytest.raises(ConfigError, match="image is not set"):
        make_plan(image="")


def test_names_are_labels_and_two_jobs_stay_two() -> None:
    names = [name_objects(JobSpec(name=name, script="t.py")) for name in
             ("gpt", "a.b", "a_b", "GPT", "7b", "x" * 63)]  # fmt: skip
    assert names[0] == "gpt"
    assert len(set(names)) == len(names)
    assert all(len(name) <= 48 and name[0].isalpha() for name in names)


def pod(phase: str = "Failed", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": {"phase": phase, **status}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason}
    return pod(containerStatuses=[{"state": {"terminated": terminated}}])


def target(reason: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": reason}])


def waits(reason: str) -> dict[str, Any]:
    return pod("Pending", containerStatuses=[{"state": {"waiting": {"reason": reason}}}])


def unscheduled(message: str) -> dict[str, Any]:
    row = {"type": "PodScheduled", "status": "False", "message": message}
    return pod("Pending", conditions=[row])


EVICTED = "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi."
ATTACHED = "FailedAttachVolume Multi-Attach error for volume pvc-1: already exclusively attached"


@pytest.mark.parametrize(
    ("found", "state", "trap", "counts"),
    [
        (pod("Succeeded"), "done", "", False),
        (ended(137, "OOMKilled"), "out of memory", "U9", True),
        (ended(137), "failed", "", True),
        (ended(7), "failed", "", True),
        (ended(143), "preempted", "", False),
        (pod(reason="Evicted", message=EVICTED), "evicted", "K8S5", True),
        (pod(reason="DeadlineExceeded"), "time limit", "", False),
        (pod(reason="NodeLost"), "node failed", "", False),
        (pod(reason="OutOfcpu"), "node failed", "", False),
        (pod(reason="Preempting"), "preempted", "", False),
        (target("PreemptionByScheduler"), "preempted", "", False),
        (target("EvictionByEvictionAPI"), "preempted", "", False),
        (target("DeletionByTaintManager"), "node failed", "", False),
        (target("TerminationByKubelet"), "evicted", "", True),
        (waits("ImagePullBackOff"), "waiting", "K8S3", False),
        (waits("ContainerCreating"), "waiting", "", False),
        (unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
         "waiting", "K8S1", False),
        (unscheduled('persistentvolumeclaim "ckpt" not found'), "waiting", "", False),
        (pod("Running"), "running", "", False),
    ],
)  # fmt: skip
def test_how_a_pod_is(found: dict[str, Any], state: str, trap: str, counts: bool) -> None:
    told = explain_pod(found)
    assert (told.state, told.trap, told.counts) == (state, trap, counts)


def test_what_a_pod_waits_for_is_in_its_events() -> None:
    told = explain_pod(pod("Pending"), ["Scheduled ok", ATTACHED])
    assert (told.trap, told.stuck) == ("K8S4", True)
    assert not explain_pod(pod("Pending"), ["Scheduled ok"]).stuck


def test_a_deleted_pod_comes_again() -> None:
    found = pod("Running")
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert explain_pod(found).state == "cancelled"


def job(condition: str = "", reason: str = "", **spec: Any) -> dict[str, Any]:
    rows = [{"type": condition, "status": "True", "reason": reason}] if condition else []
    return {"metadata": {"name": "gpt"}, "spec": {"parallelism": 1, **spec},
            "status": {"conditions": rows, "failed": 0}}  # fmt: skip


def test_delete_and_scale_down_are_told_apart() -> None:
    assert explain_job(None, [], {}).state == "cancelled"
    assert "scaled down" in explain_job(job(parallelism=0), [], {}).reason
    assert "suspended" in explain_job(job(suspend=True), [], {}).reason
    assert explain_job(job(parallelism=0), [], {}).state == "waiting"


def test_how_a_job_is() -> None:
    assert explain_job(job("Complete"), [], {}).state == "done"
    failed = explain_job(job("Failed", "BackoffLimitExceeded"), [ended(7)], {})
    assert (failed.state, failed.code) == ("failed", 7)
    killed = explain_job(job("Failed", "BackoffLimitExceeded"), [ended(137, "OOMKilled")], {})
    assert (killed.state, killed.trap) == ("out of memory", "U9")
    # The server has deleted the pods of this one.
    assert explain_job(job("Failed", "DeadlineExceeded"), [], {}).state == "time limit"
    running = explain_job(job(), [pod("Running")], {})
    assert (running.state, running.pod) == ("running", "p")
    half = explain_job(job(parallelism=2), [pod("Running"), waits("ErrImagePull")], {})
    assert (half.state, half.trap, half.stuck) == ("running", "K8S3", True)


def test_the_first_pod_is_not_one_of_the_other_jobs() -> None:
    other = pod("Running")
    other["metadata"]["labels"] = {"job-name": "gpt-nodes"}
    assert explain_job(job(), [other], {}).state == "waiting"


def test_a_start_that_does_not_come_is_told_after_a_deadline() -> None:
    stuck = PodOutcome(state="waiting", reason="ImagePullBackOff", trap="K8S3", stuck=True)
    assert judge(stuck, 10, 900).state == "waiting"
    late = judge(stuck, 901, 900)
    assert late.over
    assert "K8S3" in late.reason
    assert judge(PodOutcome(state="waiting", reason="suspended"), 901, 900).state == "waiting"
    assert judge(structs.replace(stuck, attempt=2), 901, 900).state == "waiting"
    assert judge(PodOutcome(state="preempted", code=143), 1, 1).state == "killed"
    assert judge(PodOutcome(state="failed", code=7), 1, 1).code == 7


def test_what_the_place_says_is_compared() -> None:
    section = KubernetesSection(server="1.26")
    assert [f.level for f in compare_version(section, "v1.20.2")] == ["error"]
    assert [f.level for f in compare_version(section, "v1.30.1-gke.1")] == ["note"]
    assert compare_version(section, "v1.26.15+k3s1") == []
    node = {"status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    assert check_nodes([node], "nvidia.com/gpu", 4) == []
    assert [f.trap for f in check_nodes([node], "nvidia.com/gpu", 8)] == ["K8S1"]
    assert [f.trap for f in check_nodes([], "nvidia.com/gpu", 1)] == ["K8S1"]
    claim = {"spec": {"accessModes": ["ReadWriteOnce"]}}
    assert [f.trap for f in check_claim(make_plan(2), claim)] == ["K8S4"]
    assert check_claim(make_plan(1), claim) == []
    assert [f.level for f in check_claim(make_plan(storage="", claim="x"), None)] == ["error"]


def test_versions_are_read_as_servers_write_them() -> None:
    assert parse_version("v1.9") < parse_version("v1.20.2") < parse_version("1.31+")
    with pytest.raises(ConfigError, match="no version"):
        parse_version("latest")


def test_a_pod_that_is_told_to_go_comes_again_unless_the_job_is_done() -> None:
    assert decide_code(0, "stopped", True) == 143
    assert decide_code(0, "done", True) == 0
    assert decide_code(0, "stopped", False) == 0  # A person's stop.
    assert decide_code(7, "failed", False) == 7


def test_the_role_of_a_pod() -> None:
    assert read_pod_role({}) == "first"
    assert read_pod_role({"JOB_COMPLETION_INDEX": "0"}) == "first"
    assert read_pod_role({"JOB_COMPLETION_INDEX": "2"}) == "node"
    assert read_pod_role({"PERDURE_POD_ROLE": "node"}) == "node"
