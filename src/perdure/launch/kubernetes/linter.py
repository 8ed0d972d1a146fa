"""perdure's own linter of manifests: what an API server refuses, and what costs a training job.

Schema validators and `kubectl --dry-run=client` pass most of it: they know names and types of
fields, and nothing of how fields go together. Pure: parsed documents in, findings out. A finding
is an `error` where the server refuses the object or the job cannot train, and a `warning` where
it runs and may lose what it did.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.launch.kubernetes import shapes
from perdure.launch.kubernetes.containers import lint_containers
from perdure.launch.kubernetes.security import find_violations
from perdure.model.platforms.kubernetes import parse_version
from perdure.model.platforms.launching import Finding

Object = Mapping[str, Any]


def lint_manifests(documents: Sequence[Object], server: str = "1.31") -> list[Finding]:
    """Return what is wrong with the documents of one job, on a server of that version."""
    found: list[Finding] = []
    services = [d for d in documents if d.get("kind") == "Service"]
    made = [d for d in documents if d.get("kind") == "PersistentVolumeClaim"]
    claims = {d.get("metadata", {}).get("name", ""): d for d in made}
    for document in documents:
        kind = str(document.get("kind", ""))
        if not kind or not document.get("apiVersion"):
            found.append(_error("?", "apiVersion and kind are required"))
            continue
        if (name := shapes.KINDS.get(kind.lower(), kind)) != kind:
            found.append(_error("?", f"kind {kind}: it is {name}"))
            continue
        at = f"{kind} {document.get('metadata', {}).get('name', '?')}"
        found += lint_fields(document, shapes.TOP, at)
        found += _lint_metadata(document, kind, at)
        spec = document.get("spec", {})
        if kind == "Job" and not str(document["apiVersion"]).startswith("batch/v1"):
            found.append(_error(at, f"apiVersion {document['apiVersion']}: a Job is batch/v1"))
        if kind == "PersistentVolumeClaim":
            found += _lint_claim(spec, at)
        if kind == "Service":
            found += _lint_service(spec, at)
        for name, job in find_jobs(document):
            found += _lint_job(job, name, f"{at}.spec", server)
            found += _lint_pod(job, services, claims, f"{at}.spec.template.spec", kind)
    return found


def find_jobs(document: Object) -> Iterator[tuple[str, Object]]:
    """Yield the name and the spec of each Job in a document: its own, or those in a JobSet."""
    kind, spec = document.get("kind"), document.get("spec", {})
    name = str(document.get("metadata", {}).get("name", ""))
    if kind == "Job":
        yield name, spec
    if kind == "TrainingRuntime":
        spec = spec.get("template", {}).get("spec", {})
    if kind in ("JobSet", "TrainingRuntime"):
        for one in spec.get("replicatedJobs", ()):
            yield f"{name}-{one.get('name', '')}-0", one.get("template", {}).get("spec", {})


def lint_fields(value: Object, known: frozenset[str], at: str) -> list[Finding]:
    """Return the fields that no server knows."""
    return [_error(at, f"unknown field {key}") for key in value if key not in known]


def _error(at: str, text: str, hint: str = "", trap: str = "") -> Finding:
    return Finding("error", f"{at}: {text}", hint, trap)


def _warning(at: str, text: str, hint: str = "", trap: str = "") -> Finding:
    return Finding("warning", f"{at}: {text}", hint, trap)


def _lint_metadata(document: Object, kind: str, at: str) -> list[Finding]:
    metadata = document.get("metadata", {})
    found = lint_fields(metadata, shapes.METADATA, f"{at}.metadata")
    name = str(metadata.get("name", ""))
    if not name and not metadata.get("generateName"):
        found.append(_error(at, "metadata.name is required"))
    form = shapes.SERVICE if kind == "Service" else shapes.SUBDOMAIN
    if name and not form.fullmatch(name):
        found.append(
            _error(at, f"metadata.name {name!r}: lower-case letters, digits and -"
                   + (", a letter first" if kind == "Service" else ""))
        )  # fmt: skip
    return found + _lint_labels(metadata.get("labels", {}), f"{at}.metadata.labels")


def _lint_labels(labels: Object, at: str) -> list[Finding]:
    return [
        _error(at, f"{key}: {value!r} is no value of a label")
        for key, value in labels.items()
        if not isinstance(value, str) or not shapes.LABEL_VALUE.fullmatch(value)
    ]


def _lint_claim(spec: Object, at: str) -> list[Finding]:
    found = lint_fields(spec, shapes.CLAIM, f"{at}.spec")
    modes = spec.get("accessModes", ())
    if not modes:
        found.append(_error(at, "spec.accessModes: at least one is required"))
    for mode in modes:
        if mode not in shapes.MODES:
            found.append(_error(at, f"spec.accessModes: {mode!r} is none"))
    if "ReadWriteOncePod" in modes and len(modes) > 1:
        found.append(_error(at, "spec.accessModes: ReadWriteOncePod goes with no other"))
    size = spec.get("resources", {}).get("requests", {}).get("storage")
    if size is None:
        found.append(_error(at, "spec.resources.requests.storage is required"))
    elif not shapes.read_quantity(size):
        found.append(_error(at, f"spec.resources.requests.storage: {size!r} is no quantity",
                            "such as 100Gi"))  # fmt: skip
    if (mode := spec.get("volumeMode", "Filesystem")) not in ("Filesystem", "Block"):
        found.append(_error(at, f"spec.volumeMode {mode!r}: Filesystem or Block"))
    if (storage := spec.get("storageClassName")) and not shapes.SUBDOMAIN.fullmatch(storage):
        found.append(_error(at, f"spec.storageClassName {storage!r} is no name"))
    return found


def _lint_service(spec: Object, at: str) -> list[Finding]:
    found = _lint_labels(spec.get("selector", {}), f"{at}.spec.selector")
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        found.append(_error(at, "spec.ports is required, but for a headless Service",
                            "clusterIP: None"))  # fmt: skip
    for one in spec.get("ports", ()):
        number = one.get("port")
        if type(number) is not int or not 1 <= number <= 65535:
            found.append(_error(at, f"spec.ports: {number!r} is no port"))
    return found


def _lint_job(job: Object, name: str, at: str, server: str) -> list[Finding]:
    found = lint_fields(job, shapes.JOB, at)
    version = parse_version(server)
    for field, since in shapes.SINCE.items():
        if field in job and version < since:
            text = f"{field}: a server {server} drops it; it is there from {since[0]}.{since[1]} on"
            found.append(_error(at, text, "kubernetes.server is the server's version"))
    pod = job.get("template", {}).get("spec", {})
    policy = pod.get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        found.append(_error(f"{at}.template.spec", f"restartPolicy {policy or 'Always'}: a Job "
                            "takes Never or OnFailure", "Never", "K8S2"))  # fmt: skip
    for field in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds",
                  "ttlSecondsAfterFinished"):  # fmt: skip
        value = job.get(field)
        if value is not None and (type(value) is not int or value < 0):
            found.append(_error(at, f"{field}: {value!r} is no number from 0 on"))
    indexed = job.get("completionMode") == "Indexed"
    if job.get("completionMode") not in (None, "Indexed", "NonIndexed"):
        found.append(_error(at, f"completionMode {job['completionMode']!r}: Indexed or NonIndexed"))
    if indexed and job.get("completions") is None:
        found.append(_error(at, "completionMode Indexed: completions is required"))
    last = f"{name}-{max(0, _count(job, 'completions') - 1)}"
    if indexed and not shapes.LABEL.fullmatch(last):
        found.append(_error(at, f"the host name {last} of an indexed pod is no DNS label"))
    if "selector" in job and not job.get("manualSelector"):
        found.append(_error(at, "selector: made by the server", "leave it out"))
    return found + _lint_failure_policy(job, pod, f"{at}.podFailurePolicy")


def _count(job: Object, field: str) -> int:
    """Return how many pods a Job asks for; 1 where that is not said, or is no number."""
    value = job.get(field)
    return value if type(value) is int else 1


def _lint_failure_policy(job: Object, pod: Object, at: str) -> list[Finding]:
    policy = job.get("podFailurePolicy")
    if policy is None:
        return []
    found = []
    if pod.get("restartPolicy") != "Never":
        found.append(_error(at, "only with restartPolicy: Never"))
    names = {c.get("name") for c in (*pod.get("initContainers", ()), *pod.get("containers", ()))}
    rules = policy.get("rules", ())
    if not 1 <= len(rules) <= 20:
        found.append(_error(at, f"{len(rules)} rules: 1 to 20"))
    for number, rule in enumerate(rules):
        where = f"{at}.rules[{number}]"
        action = rule.get("action")
        if action not in ("FailJob", "FailIndex", "Ignore", "Count"):
            found.append(_error(where, f"action {action!r}: FailJob, FailIndex, Ignore or Count"))
        if action == "FailIndex" and job.get("backoffLimitPerIndex") is None:
            found.append(_error(where, "FailIndex: backoffLimitPerIndex is required"))
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if bool(exits) == bool(conditions):
            found.append(_error(where, "one of onExitCodes and onPodConditions"))
        if exits:
            found += _lint_exit_codes(exits, names, where)
    return found


def _lint_exit_codes(exits: Object, names: set[Any], at: str) -> list[Finding]:
    found = []
    values, operator = list(exits.get("values", ())), exits.get("operator")
    if operator not in ("In", "NotIn"):
        found.append(_error(at, f"operator {operator!r}: In or NotIn"))
    if not 1 <= len(values) <= 255:
        found.append(_error(at, "values: 1 to 255 exit codes"))
    if values != sorted(set(values)):
        found.append(_error(at, "values: in order, and none twice"))
    if operator == "In" and 0 in values:
        found.append(_error(at, "values: 0 is no failure"))
    if exits.get("containerName") not in (None, *names):
        found.append(_error(at, f"containerName: no container {exits['containerName']!r}"))
    return found


def _lint_pod(
    job: Object, services: Sequence[Object], claims: Mapping[str, Object], at: str, kind: str
) -> list[Finding]:
    pod = job.get("template", {}).get("spec", {})
    found = lint_fields(pod, shapes.POD, at)
    labels = job.get("template", {}).get("metadata", {}).get("labels", {})
    found += _lint_labels(labels, f"{at.removesuffix('.spec')}.metadata.labels")
    found += _lint_labels(pod.get("nodeSelector", {}), f"{at}.nodeSelector")
    for field in sorted(shapes.SWITCHES & pod.keys()):
        if not isinstance(pod[field], bool):
            found.append(_error(at, f"{field}: {pod[field]!r} is neither true nor false"))
    for field in ("hostname", "subdomain"):
        if field in pod and not shapes.LABEL.fullmatch(str(pod[field])):
            found.append(_error(at, f"{field} {pod[field]!r} is no DNS label"))
    if pod.get("dnsPolicy") == "None" and not pod.get("dnsConfig"):
        found.append(_error(at, "dnsPolicy None: dnsConfig is required"))
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if type(grace) is not int or grace < 0:
        found.append(_error(at, f"terminationGracePeriodSeconds: {grace!r}"))
    elif grace == 0:
        found.append(_warning(at, "terminationGracePeriodSeconds 0: killed without a checkpoint"))
    for number, one in enumerate(pod.get("tolerations", ())):
        found += _lint_toleration(one, f"{at}.tolerations[{number}]")
    subdomain = pod.get("subdomain")
    if subdomain is not None:
        named = [s for s in services if s.get("metadata", {}).get("name") == subdomain]
        selector = named[0].get("spec", {}).get("selector", {}) if named else {}
        if services and not named:
            found.append(_warning(at, f"subdomain {subdomain}: no Service of that name here"))
        if any(labels.get(key) != value for key, value in selector.items()):
            found.append(_warning(at, f"Service {subdomain} does not select these pods"))
    found += lint_containers(pod, at)
    if refused := find_violations(pod):
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        text = f"a namespace that enforces `restricted` refuses it: {'; '.join(refused[:3])}{more}"
        found.append(_warning(at, text, "Pod Security Standards"))
    return found + _lint_storage(job, pod, claims, at)


def _lint_toleration(one: Object, at: str) -> list[Finding]:
    found = lint_fields(one, shapes.TOLERATION, at)
    operator = one.get("operator", "Equal")
    if operator not in ("Exists", "Equal", "Lt", "Gt"):
        found.append(_error(at, f"operator {operator!r}: Exists or Equal"))
    if operator == "Exists" and one.get("value"):
        found.append(_error(at, "value must be empty where operator is Exists"))
    if not one.get("key") and operator != "Exists":
        found.append(_error(at, "operator must be Exists where there is no key"))
    if one.get("effect") not in (None, "", *shapes.EFFECTS):
        found.append(_error(at, f"effect {one['effect']!r}"))
    if one.get("tolerationSeconds") is not None and one.get("effect") != "NoExecute":
        found.append(_error(at, "tolerationSeconds: only where effect is NoExecute"))
    return found


def _lint_storage(job: Object, pod: Object, claims: Mapping[str, Object], at: str) -> list[Finding]:
    """Return whether what is written outlives the pod, and several pods can share it."""
    used = [v["persistentVolumeClaim"].get("claimName", "") for v in pod.get("volumes", ())
            if isinstance(v.get("persistentVolumeClaim"), Mapping)]  # fmt: skip
    if not used and not any(v.get("nfs") or v.get("csi") for v in pod.get("volumes", ())):
        return [_warning(at, "no volume outlives the pod: checkpoints go with it",
                         "mount a PersistentVolumeClaim at DURABLE_DIR", "K8S5")]  # fmt: skip
    found = []
    for name in used:
        if name not in claims:
            continue
        modes = claims[name].get("spec", {}).get("accessModes", ())
        if _count(job, "parallelism") > 1 and "ReadWriteMany" not in modes:
            mode = ", ".join(modes)
            found.append(_error(at, f"{job['parallelism']} pods share the claim {name}, which is "
                                f"{mode}: pods on other nodes wait for ever",
                                "accessModes: [ReadWriteMany]", "K8S4"))  # fmt: skip
    return found
