"""perdure's own linter of manifests: what an API server refuses, and what costs a training job.

Schema validators and `kubectl --dry-run=client` pass most of it: they know names and types of
fields, and nothing of how fields go together. Pure: parsed documents in, findings out. A finding
is an `error` where the server refuses the object or the job cannot train, and a `warning` where
it runs and may lose what it did.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.launch.kubernetes import shapes
from perdure.launch.kubernetes.containers import error, lint_containers, lint_fields, warning
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
        kind, api = str(document.get("kind", "")), document.get("apiVersion")
        if not kind or not api:
            found += error("?", True, "apiVersion and kind are required")
            continue
        if (name := shapes.KINDS.get(kind.lower(), kind)) != kind:
            found += error("?", True, f"kind {kind}: it is {name}")
            continue
        at, spec = f"{kind} {document.get('metadata', {}).get('name', '?')}", document.get("spec")
        batch = kind != "Job" or str(api).startswith("batch/v1")
        found += lint_fields(document, shapes.TOP, at)
        found += _lint_metadata(document, kind, at)
        found += error(at, not batch, f"apiVersion {api}: a Job is batch/v1")
        if kind == "PersistentVolumeClaim":
            found += _lint_claim(spec or {}, at)
        if kind == "Service":
            found += _lint_service(spec or {}, at)
        for name, job in find_jobs(document):
            found += _lint_job(job, name, f"{at}.spec", server)
            found += _lint_pod(job, services, claims, f"{at}.spec.template.spec")
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


def _lint_metadata(document: Object, kind: str, at: str) -> list[Finding]:
    metadata, service = document.get("metadata", {}), kind == "Service"
    name = str(metadata.get("name", ""))
    form = shapes.SERVICE if service else shapes.SUBDOMAIN
    wanted = "lower-case letters, digits and -" + (", a letter first" if service else "")
    return [
        *lint_fields(metadata, shapes.METADATA, f"{at}.metadata"),
        *error(at, not (name or metadata.get("generateName")), "metadata.name is required"),
        *error(at, name and not form.fullmatch(name), f"metadata.name {name!r}: {wanted}"),
        *_lint_labels(metadata.get("labels", {}), f"{at}.metadata.labels"),
    ]


def _lint_labels(labels: Object, at: str) -> list[Finding]:
    return [
        one
        for key, value in labels.items()
        if not isinstance(value, str) or not shapes.LABEL_VALUE.fullmatch(value)
        for one in error(at, True, f"{key}: {value!r} is no value of a label")
    ]


def _lint_claim(spec: Object, at: str) -> list[Finding]:
    modes, storage = spec.get("accessModes", ()), spec.get("storageClassName")
    lone = "ReadWriteOncePod" in modes and len(modes) > 1
    size = spec.get("resources", {}).get("requests", {}).get("storage")
    asked = "spec.resources.requests.storage"
    odd = size is not None and not shapes.read_quantity(size)
    mode = spec.get("volumeMode", "Filesystem")
    found = lint_fields(spec, shapes.CLAIM, f"{at}.spec")
    found += error(at, not modes, "spec.accessModes: at least one is required")
    for one in modes:
        found += error(at, one not in shapes.MODES, f"spec.accessModes: {one!r} is none")
    return [
        *found,
        *error(at, lone, "spec.accessModes: ReadWriteOncePod goes with no other"),
        *error(at, size is None, f"{asked} is required"),
        *error(at, odd, f"{asked}: {size!r} is no quantity", "such as 100Gi"),
        *error(
            at,
            mode not in ("Filesystem", "Block"),
            f"spec.volumeMode {mode!r}: Filesystem or Block",
        ),
        *error(
            at,
            storage and not shapes.SUBDOMAIN.fullmatch(storage),
            f"spec.storageClassName {storage!r} is no name",
        ),
    ]


def _lint_service(spec: Object, at: str) -> list[Finding]:
    lacks = not spec.get("ports") and spec.get("clusterIP") != "None"
    found = _lint_labels(spec.get("selector", {}), f"{at}.spec.selector")
    text = "spec.ports is required, but for a headless Service"
    found += error(at, lacks, text, "clusterIP: None")
    for one in spec.get("ports", ()):
        number = one.get("port")
        known = type(number) is int and 1 <= number <= 65535
        found += error(at, not known, f"spec.ports: {number!r} is no port")
    return found


def _lint_job(job: Object, name: str, at: str, server: str) -> list[Finding]:
    found = lint_fields(job, shapes.JOB, at)
    version = parse_version(server)
    for field, since in shapes.SINCE.items():
        text = f"{field}: a server {server} drops it; it is there from {since[0]}.{since[1]} on"
        dropped = field in job and version < since
        found += error(at, dropped, text, "kubernetes.server is the server's version")
    pod = job.get("template", {}).get("spec", {})
    policy = pod.get("restartPolicy")
    text = f"restartPolicy {policy or 'Always'}: a Job takes Never or OnFailure"
    wrong = policy not in ("Never", "OnFailure")
    found += error(f"{at}.template.spec", wrong, text, "Never", "K8S2")
    for field in shapes.COUNTS:
        value = job.get(field)
        known = value is None or (type(value) is int and value >= 0)
        found += error(at, not known, f"{field}: {value!r} is no number from 0 on")
    mode = job.get("completionMode")
    indexed, known = mode == "Indexed", mode in (None, "Indexed", "NonIndexed")
    endless = indexed and job.get("completions") is None
    last = f"{name}-{max(0, _count(job, 'completions') - 1)}"
    unnamed = indexed and not shapes.LABEL.fullmatch(last)
    selects = "selector" in job and not job.get("manualSelector")
    return [
        *found,
        *error(at, not known, f"completionMode {mode!r}: Indexed or NonIndexed"),
        *error(at, endless, "completionMode Indexed: completions is required"),
        *error(at, unnamed, f"the host name {last} of an indexed pod is no DNS label"),
        *error(at, selects, "selector: made by the server", "leave it out"),
        *_lint_failure_policy(job, pod, f"{at}.podFailurePolicy"),
    ]


def _count(job: Object, field: str) -> int:
    """Return how many pods a Job asks for; 1 where that is not said, or is no number."""
    value = job.get(field)
    return value if type(value) is int else 1


def _lint_failure_policy(job: Object, pod: Object, at: str) -> list[Finding]:
    policy = job.get("podFailurePolicy")
    if policy is None:
        return []
    rules, never = policy.get("rules", ()), pod.get("restartPolicy") == "Never"
    names = {c.get("name") for c in (*pod.get("initContainers", ()), *pod.get("containers", ()))}
    found = error(at, not never, "only with restartPolicy: Never")
    found += error(at, not 1 <= len(rules) <= 20, f"{len(rules)} rules: 1 to 20")
    for number, rule in enumerate(rules):
        where, action = f"{at}.rules[{number}]", rule.get("action")
        known = action in ("FailJob", "FailIndex", "Ignore", "Count")
        single = action == "FailIndex" and job.get("backoffLimitPerIndex") is None
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        one = bool(exits) != bool(conditions)
        found += [
            *error(where, not known, f"action {action!r}: FailJob, FailIndex, Ignore or Count"),
            *error(where, single, "FailIndex: backoffLimitPerIndex is required"),
            *error(where, not one, "one of onExitCodes and onPodConditions"),
            *(_lint_exit_codes(exits, names, where) if exits else ()),
        ]
    return found


def _lint_exit_codes(exits: Object, names: set[Any], at: str) -> list[Finding]:
    values, operator = list(exits.get("values", ())), exits.get("operator")
    name = exits.get("containerName")
    return [
        *error(at, operator not in ("In", "NotIn"), f"operator {operator!r}: In or NotIn"),
        *error(at, not 1 <= len(values) <= 255, "values: 1 to 255 exit codes"),
        *error(at, values != sorted(set(values)), "values: in order, and none twice"),
        *error(at, operator == "In" and 0 in values, "values: 0 is no failure"),
        *error(at, name not in (None, *names), f"containerName: no container {name!r}"),
    ]


def _lint_pod(
    job: Object, services: Sequence[Object], claims: Mapping[str, Object], at: str
) -> list[Finding]:
    pod = job.get("template", {}).get("spec", {})
    labels = job.get("template", {}).get("metadata", {}).get("labels", {})
    found = [
        *lint_fields(pod, shapes.POD, at),
        *_lint_labels(labels, f"{at.removesuffix('.spec')}.metadata.labels"),
        *_lint_labels(pod.get("nodeSelector", {}), f"{at}.nodeSelector"),
    ]
    for field in sorted(shapes.SWITCHES & pod.keys()):
        text = f"{field}: {pod[field]!r} is neither true nor false"
        found += error(at, not isinstance(pod[field], bool), text)
    for field in ("hostname", "subdomain"):
        known = field not in pod or shapes.LABEL.fullmatch(str(pod[field]))
        found += error(at, not known, f"{field} {pod.get(field)!r} is no DNS label")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    lone = pod.get("dnsPolicy") == "None" and not pod.get("dnsConfig")
    odd = type(grace) is not int or grace < 0
    hard = type(grace) is int and grace == 0
    found += [
        *error(at, lone, "dnsPolicy None: dnsConfig is required"),
        *error(at, odd, f"terminationGracePeriodSeconds: {grace!r}"),
        *warning(at, hard, "terminationGracePeriodSeconds 0: killed without a checkpoint"),
    ]
    for number, one in enumerate(pod.get("tolerations", ())):
        found += _lint_toleration(one, f"{at}.tolerations[{number}]")
    if (subdomain := pod.get("subdomain")) is not None:
        named = [s for s in services if s.get("metadata", {}).get("name") == subdomain]
        selector = named[0].get("spec", {}).get("selector", {}) if named else {}
        lost = any(labels.get(key) != value for key, value in selector.items())
        alone = services and not named
        found += warning(at, alone, f"subdomain {subdomain}: no Service of that name here")
        found += warning(at, lost, f"Service {subdomain} does not select these pods")
    refused = find_violations(pod)
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    text = f"a namespace that enforces `restricted` refuses it: {'; '.join(refused[:3])}{more}"
    return [
        *found,
        *lint_containers(pod, at),
        *warning(at, refused, text, "Pod Security Standards"),
        *_lint_storage(job, pod, claims, at),
    ]


def _lint_toleration(one: Object, at: str) -> list[Finding]:
    operator, effect = one.get("operator", "Equal"), one.get("effect")
    known, exists = operator in ("Exists", "Equal", "Lt", "Gt"), operator == "Exists"
    timed = one.get("tolerationSeconds") is not None and effect != "NoExecute"
    return [
        *lint_fields(one, shapes.TOLERATION, at),
        *error(at, not known, f"operator {operator!r}: Exists or Equal"),
        *error(at, exists and one.get("value"), "value must be empty where operator is Exists"),
        *error(at, not (one.get("key") or exists), "operator must be Exists where there is no key"),
        *error(at, effect not in (None, "", *shapes.EFFECTS), f"effect {effect!r}"),
        *error(at, timed, "tolerationSeconds: only where effect is NoExecute"),
    ]


def _lint_storage(job: Object, pod: Object, claims: Mapping[str, Object], at: str) -> list[Finding]:
    """Return whether what is written outlives the pod, and several pods can share it."""
    volumes = pod.get("volumes", ())
    sources = [volume.get("persistentVolumeClaim") for volume in volumes]
    used = [one.get("claimName", "") for one in sources if isinstance(one, Mapping)]
    lasting = used or any(volume.get("nfs") or volume.get("csi") for volume in volumes)
    text = "no volume outlives the pod: checkpoints go with it"
    mend = "mount a PersistentVolumeClaim at DURABLE_DIR"
    found = warning(at, not lasting, text, mend, "K8S5")
    pods = _count(job, "parallelism")
    for name in (name for name in used if name in claims and pods > 1):
        modes = claims[name].get("spec", {}).get("accessModes", ())
        text = f"{pods} pods share the claim {name}, which is {', '.join(map(str, modes))}"
        text += ": pods on other nodes wait for ever"
        lone = "ReadWriteMany" not in modes
        found += error(at, lone, text, "accessModes: [ReadWriteMany]", "K8S4")
    return found
