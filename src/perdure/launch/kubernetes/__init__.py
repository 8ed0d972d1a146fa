"""Kubernetes as a platform: a Job's manifest takes the place of the shell."""

import base64
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from perdure.launch.exchange import FOLLOWS, SILENCE_S, make_lines, show_lines
from perdure.launch.kubernetes.client import Client, list_words, name_container, open_pod
from perdure.launch.kubernetes.fields import check_profile
from perdure.launch.kubernetes.manifest import (
    ADDED_LABEL,
    locate_job_folder,
    locate_project,
    make_claim,
    make_documents,
    name_claim,
    name_objects,
    place_spec,
)
from perdure.launch.kubernetes.project import PACKED, pack
from perdure.launch.lint import check_plan
from perdure.launch.platforms import Here, Teardown
from perdure.launch.records import write_record
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import (
    JOB_LABEL,
    KubernetesSection,
    explain_pod,
    parse_version,
    tell_past,
)
from perdure.model.platforms.launching import (
    BoxState,
    Finding,
    LaunchRecord,
    Plan,
    Step,
    judge_outcome,
)
from perdure.model.platforms.outcome import PodOutcome
from perdure.model.platforms.profile import Profile
from perdure.traps.findings import error, note, warning

CLAIM, JOB = "claim.yaml", "job.yaml"
_AGAIN_S = 1.0
_KILLED = 137
"""The exit code of a command in a container that ended."""
_QUESTIONS = frozenset({"status", "diagnose", "report", "events", "logs"})
"""They change nothing, so that they may be asked twice."""


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the manifests of `spec`, and what is wrong with the profile's fields."""
    section, client = profile.kubernetes, Client(profile.kubernetes)
    documents = make_documents(spec, profile)
    claims = [make_claim(spec, profile)] if section.storage else []
    files = {CLAIM: dump(claims)} if claims else {}
    files[JOB] = dump(documents)
    steps = [Step("create what is not there yet", client.command("create", "-f", CLAIM))]
    return Plan(
        job=spec.name,
        kind="kubernetes",
        profile=profile,
        files=files,
        steps=(*(steps if claims else ()),
               Step("create the job", client.command("create", "-f", JOB))),
        findings=(
            *check_plan(spec, profile),
            *check_profile(spec, profile),
        ),
        attach=(f"perdure watch {spec.name}", f"perdure logs {spec.name} -f"),
        place=locate_job_folder(spec, profile),
        settings={"name": name_objects(spec), "claim": name_claim(spec, section),
                  "secrets": list(spec.launch.secrets), "gpus": spec.launch.gpus,
                  "pods": spec.num_nodes, "exclude": spec.launch.exclude,
                  "project": "" if section.project else spec.launch.project,
                  "roots": list_roots(spec, profile)},
    )  # fmt: skip


def list_roots(spec: JobSpec, profile: Profile) -> dict[str, str]:
    """Return what is to be pulled beside the job's own folder: label -> folder on the volume."""
    place = locate_project(spec, profile)
    roots = {f"outputs/{name}": f"{place}/{name}" for name in spec.launch.outputs}
    placed = place_spec(spec, profile)
    if (url := placed.checkpoint.url) and "://" not in url:
        roots["checkpoints"] = str(PurePosixPath(placed.cwd, url))
    durable = PurePosixPath(profile.overrides.DURABLE_DIR)
    return {k: v for k, v in roots.items() if PurePosixPath(v).is_relative_to(durable)}


def dump(documents: Sequence[Any]) -> str:
    """Return documents as YAML, in the order in which they were made."""
    return str(
        yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=1000)
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML carries no types
    """Text of several lines is shown as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="|" if "\n" in data else None
        )


_Dumper.add_representer(str, _Dumper.represent_str)


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Ask the server for its version, its verdict, and for what the manifests refer to."""
    section, client = plan.profile.kubernetes, Client(plan.profile.kubernetes)
    wanted, gpus = set(plan.settings["secrets"]), plan.settings["gpus"]
    found = compare_version(section, client.read_version())
    refused = {name: client.find_refusal(text) for name, text in plan.files.items()}
    for name, why in refused.items():
        found += error(why, f"the server refuses {name}: {why}")
    found += check_claim(plan, client.get("pvc", plan.settings["claim"]))
    lacking = sorted(wanted - (client.list_secret_keys(section.secret) or set())) if wanted else ()
    nodes = client.get_all("nodes") if gpus else ()
    return {}, (
        *found,
        *error(
            lacking,
            f"Secret {section.secret} has no {', '.join(lacking)}",
            "kubectl create secret generic",
            "U34",
        ),
        *(check_nodes(nodes, section.gpu_resource, gpus) if gpus else ()),
    )


def compare_version(section: KubernetesSection, server: str) -> list[Finding]:
    """Return what a server of another version does with the manifest."""
    wanted, there = parse_version(section.server), parse_version(server)
    hint = f'kubernetes.server = "{there[0]}.{there[1]}"'
    drops = f"the manifest is for {section.server}, and the server is {server}: it drops fields"
    return [
        *error(there < wanted, drops, hint),
        *note(there > wanted, f"the server is {server}, newer than {section.server}", hint),
    ]


def check_claim(plan: Plan, claim: Any) -> list[Finding]:
    """Return whether a claim that exists serves this job."""
    name, pods = plan.settings["claim"], plan.settings["pods"]
    if not claim:
        text = f"no claim {name}: pods would wait for ever"
        return error(
            not plan.profile.kubernetes.storage,
            text,
            "kubernetes.claim, or kubernetes.storage for a new one",
        )
    modes = claim.get("spec", {}).get("accessModes", ())
    text = f"claim {name} is {', '.join(modes)}, and {pods} pods share it"
    apart = pods > 1 and "ReadWriteMany" not in modes
    return error(apart, text, "a ReadWriteMany claim", "K8S4")


def check_nodes(nodes: Sequence[Any], resource: str, gpus: int) -> list[Finding]:
    """Return whether any node has as many GPUs to give as a pod asks for."""
    given = (int(n.get("status", {}).get("allocatable", {}).get(resource, 0)) for n in nodes)
    most = max(given, default=0)
    return warning(
        most < gpus,
        f"no node has {gpus} {resource}: the most is {most}",
        "is the device plugin up (kubectl get ds -A)? or does a pool start from zero?",
        "K8S1",
    )


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Create the claim where it is missing, and the job; return what is to be remembered."""
    client, name = Client(plan.profile.kubernetes), plan.settings["name"]
    job = client.look(name)[0]
    if job.state in ("waiting", "running"):
        raise ConfigError(
            f"job `{plan.job}` is there: {job.state} {job.reason}".rstrip(),
            hint="perdure stop, or kubectl delete job",
        )
    packed = b""
    if project := plan.settings["project"]:
        packed = pack(Path(project), plan.settings["exclude"])
        here.tell(f"sends {project}: {len(packed) / 1e3:.1f} kB, packed")
    client.delete("-f", "-", stdin=plan.files[JOB])
    client.delete("job", "-l", f"{JOB_LABEL}={name},{ADDED_LABEL}")
    exists = client.get("pvc", plan.settings["claim"])
    if CLAIM in plan.files and not exists:
        client.create(plan.files[CLAIM])
    launched_s = time.time()
    home = f"{plan.profile.overrides.DURABLE_DIR}/state"
    record = LaunchRecord(
        job=plan.job, profile=plan.profile, place=plan.place, home=home,
        python=plan.profile.launch.python, id=name, launched_s=launched_s,
        roots={"job": f"{home}/jobs/{plan.job}", **plan.settings["roots"]},
        project=plan.settings["project"],
    )  # fmt: skip
    write_record(here.home, record)  # Before it costs: whatever breaks now, it is not forgotten.
    client.create(complete(plan.files[JOB], f"{launched_s:.0f}", packed))
    here.tell(f"created {plan.profile.kubernetes.shape} {name}")
    return record


def complete(manifest: str, number: str, packed: bytes) -> str:
    """Return the manifest with the launch's own number and the project in the ConfigMap.

    What an earlier launch of the same name has left on the volume is then not taken for this one's.
    Without a number the manifest is to be applied by hand.
    """
    documents = list(yaml.safe_load_all(manifest))
    for document in documents:
        if document["kind"] == "ConfigMap":
            if number:
                document["data"]["launch"] = number
            if packed:
                document["binaryData"] = {PACKED: base64.b64encode(packed).decode()}
    return dump(documents)


def query_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the job is, by the server."""
    return _judge_now(record, Client(record.profile.kubernetes).look(record.id)[0])


def _judge_now(record: LaunchRecord, job: PodOutcome) -> BoxState:
    return judge(job, time.time() - record.launched_s, record.profile.kubernetes.start_deadline_s)


def list_past(record: LaunchRecord) -> tuple[str, ...]:
    """Return what happened to the job's pods and their nodes, by the server, the oldest first."""
    client = Client(record.profile.kubernetes)
    return tell_past(
        record.id,
        client.get_all("pods", "-l", f"{JOB_LABEL}={record.id}"),
        client.get_all("events"),
    )


def judge(job: PodOutcome, waited_s: float, deadline_s: float) -> BoxState:
    """Return the state of a launched job; a start that does not come is told after a deadline."""
    reason = f"[{job.trap}] {job.reason}" if job.trap else job.reason
    if job.state == "waiting" and job.stuck and job.attempt == 1 and waited_s > deadline_s:
        return BoxState(
            state="not-started", code=1, reason=f"not started after {waited_s:.0f} s: {reason}"
        )
    where = "" if job.over else f"in pod {job.pod}"
    return judge_outcome(job, job.attempt, reason or where)


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Run a perdure command line in the first pod; of a job that is over, beside its volume.

    A question that dies with its pod is asked once more where the job is by then.
    """
    if FOLLOWS & set(argv):
        return _follow(record, argv, here)
    code = _run_once(record, argv, here)
    if code != _KILLED or argv[0] not in _QUESTIONS:
        return code
    here.tell("the pod went while it was asked: once more")
    time.sleep(_AGAIN_S)
    return _run_once(record, argv, here)


def _run_once(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    section, client = record.profile.kubernetes, Client(record.profile.kubernetes)
    job, pods = client.look(record.id)
    if not job.pod and list(argv) == ["logs", record.job] and pods:
        pod = max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp", "")))
        previous = ["--previous"] if _is_restarted(pod) else []
        words = ["logs", pod["metadata"]["name"], "-c", name_container(section), *previous]
        return show_lines(client.command(*words), SILENCE_S)
    if job.state == "waiting":
        raise PlatformError(
            f"no pod of job `{record.job}` runs: {job.state}: {job.reason}",
            hint="what it wrote is on its volume",
        )
    with open_pod(record, here) as there:
        command = there.enter(*list_words(record, argv), stdin=False)
        if argv[0] in ("logs", "events"):
            return show_lines(command, SILENCE_S)
        return subprocess.run(command, check=False).returncode


def _follow(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Follow a stream through as many pods as the job takes; no line comes twice."""
    client = Client(record.profile.kubernetes)
    show, told = make_lines(argv), ""
    as_json = ["--json"] if argv[0] == "logs" and "--json" not in argv else []
    script = shlex.join(list_words(record, [*argv, *as_json]))
    while True:
        job, _ = client.look(record.id)
        if job.state != "waiting":
            with open_pod(record, here) as there:
                show.begin()
                code = there.stream(script, show)
            if code is not None:
                return code
        elif (state := _judge_now(record, job)).over:
            raise PlatformError(f"job `{record.job}`: {state.reason}")
        elif state.reason != told:
            told = state.reason
            here.tell(f"waiting: {told}")
        time.sleep(_AGAIN_S)


def _is_restarted(pod: Any) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    again = any(one.get("restartCount", 0) for one in statuses)
    return again and explain_pod(pod).state == "waiting"


class KubernetesTeardown(Teardown):
    """The objects of a job."""

    def render_deletion(self, record: LaunchRecord, *, with_volume: bool) -> tuple[str, ...]:
        """Return the command that deletes them, and the job's claim where perdure made it."""
        section = record.profile.kubernetes
        kinds = {"job": "job", "jobset": "jobset", "trainjob": "trainjob,trainingruntime",
                 "pytorchjob": "pytorchjob"}  # fmt: skip
        claims = ",pvc" if with_volume else ""
        return Client(section).command(
            "delete", f"{kinds[section.shape]},service,configmap{claims}",
            "-l", f"{JOB_LABEL}={record.id}", "--cascade=foreground", "--wait",
        )  # fmt: skip


TEARDOWN = KubernetesTeardown()


def render_forward(record: LaunchRecord, ports: Sequence[int]) -> list[str]:
    """Return the command that forwards ports of the job's first pod to the same ports here.

    Raises:
        PlatformError: no pod of it runs, or nobody answers.
    """
    client = Client(record.profile.kubernetes)
    job, _ = client.look(record.id)
    if not job.pod:
        raise PlatformError(f"no pod of job `{record.job}` runs: {job.state}: {job.reason}")
    return [*client.command("port-forward", f"pod/{job.pod}"), *map(str, ports)]
