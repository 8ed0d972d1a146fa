"""perdure's own linter of manifests: what an API server refuses, and what costs a training job.

Schema validators and `kubectl --dry-run=client` pass most of it: they know names and types of
fields, and nothing of how fields go together. Pure: parsed documents in, findings out. A finding
is an `error` where the server refuses the object or the job cannot train, and a `warning` where
it runs and may lose what it did.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.launch.exchange import name_first
from perdure.launch.kubernetes import shapes
from perdure.launch.kubernetes.manifest import choose_mount_mode
from perdure.launch.kubernetes.security import explain_security, find_violations
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import FAILURE_POLICY, parse_version
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.traps import findings
from perdure.traps.findings import error, note, warning

Object = Mapping[str, Any]
Found = list[Finding]
_NATIVE = ("cpu", "memory", "ephemeral-storage", "storage", "pods")


def lint_manifests(documents: Sequence[Object], server: str = "1.31") -> Found:
    """Return what is wrong with the documents of one job, on a server of that version."""
    return [one for document in documents for one in _lint(document, documents, server)]


def _lint(document: Object, documents: Sequence[Object], server: str) -> Found:
    kind, api = str(document.get("kind", "")), document.get("apiVersion")
    if not kind or not api:
        return _error("?", True, "apiVersion and kind are required")
    if (name := shapes.KINDS.get(kind.lower(), kind)) != kind:
        return _error("?", True, f"kind {kind}: it is {name}")
    at, batch = f"{kind} {_read_name(document, '?')}", str(api).startswith("batch/v1")
    own = {"PersistentVolumeClaim": _lint_claim, "Service": _lint_service}.get(kind)
    found = [
        *_lint_fields(document, shapes.TOP, at),
        *_lint_metadata(document, kind, at),
        *_error(at, kind == "Job" and not batch, f"apiVersion {api}: a Job is batch/v1"),
        *(own(document.get("spec") or {}, at) if own else ()),
    ]
    for name, job in list_job_specs(document):
        found += _lint_job(job, name, f"{at}.spec", server)
        found += _lint_pod(job, documents, f"{at}.spec.template.spec")
    if kind == "PyTorchJob":
        found += _lint_pytorchjob(document, documents, f"{at}.spec")
    return found


def _read_name(document: Object, otherwise: str = "") -> str:
    return str(document.get("metadata", {}).get("name", otherwise))


def _error(at: str, when: object, text: str, hint: str = "", trap: str = "") -> Found:
    """Return what is refused in a place of a manifest, or cannot train; see `traps.findings`."""
    return findings.error(when, f"{at}: {text}", hint, trap)


def _warning(at: str, when: object, text: str, hint: str = "", trap: str = "") -> Found:
    """Return what runs and may lose what it did; see `traps.findings`."""
    return findings.warning(when, f"{at}: {text}", hint, trap)


def _refuse(at: str, values: Iterable[Any], known: Callable[[Any], object], text: str) -> Found:
    """Return the `values` that are not `known`, each as {!r} in the text."""
    return [one for v in values for one in _error(at, not known(v), text.format(v))]


def _lint_fields(value: Object, known: frozenset[str], at: str) -> Found:
    """Return the fields that no server knows."""
    return [one for key in value for one in _error(at, key not in known, f"unknown field {key}")]


def list_job_specs(document: Object) -> Iterator[tuple[str, Object]]:
    """Yield the name and the spec of each Job in a document: its own, or those in a JobSet."""
    kind, spec, name = document.get("kind"), document.get("spec", {}), _read_name(document)
    if kind == "Job":
        yield name, spec
    if kind == "TrainingRuntime":
        spec = spec.get("template", {}).get("spec", {})
    if kind in ("JobSet", "TrainingRuntime"):
        for one in spec.get("replicatedJobs", ()):
            yield f"{name}-{one.get('name', '')}-0", one.get("template", {}).get("spec", {})


def _lint_metadata(document: Object, kind: str, at: str) -> Found:
    metadata, service = document.get("metadata", {}), kind == "Service"
    name = str(metadata.get("name", ""))
    form = shapes.SERVICE if service else shapes.SUBDOMAIN
    wanted = "lower-case letters, digits and -" + (", a letter first" if service else "")
    return [
        *_lint_fields(metadata, shapes.METADATA, f"{at}.metadata"),
        *_error(at, not (name or metadata.get("generateName")), "metadata.name is required"),
        *_error(at, name and not form.fullmatch(name), f"metadata.name {name!r}: {wanted}"),
        *_lint_labels(metadata.get("labels", {}), f"{at}.metadata.labels"),
    ]


def _lint_labels(labels: Object, at: str) -> Found:
    return [
        one
        for key, value in labels.items()
        if not isinstance(value, str) or not shapes.LABEL_VALUE.fullmatch(value)
        for one in _error(at, True, f"{key}: {value!r} is no value of a label")
    ]


def _lint_claim(spec: Object, at: str) -> Found:
    modes, storage = spec.get("accessModes", ()), spec.get("storageClassName")
    lone = "ReadWriteOncePod" in modes and len(modes) > 1
    size = spec.get("resources", {}).get("requests", {}).get("storage")
    asked, mode = "spec.resources.requests.storage", spec.get("volumeMode", "Filesystem")
    odd = size is not None and not shapes.read_quantity(size)
    return [
        *_lint_fields(spec, shapes.CLAIM, f"{at}.spec"),
        *_error(at, not modes, "spec.accessModes: at least one is required"),
        *_refuse(at, modes, shapes.MODES.__contains__, "spec.accessModes: {!r} is none"),
        *_error(at, lone, "spec.accessModes: ReadWriteOncePod goes with no other"),
        *_error(at, size is None, f"{asked} is required"),
        *_error(at, odd, f"{asked}: {size!r} is no quantity", "such as 100Gi"),
        *_error(
            at,
            mode not in ("Filesystem", "Block"),
            f"spec.volumeMode {mode!r}: Filesystem or Block",
        ),
        *_error(
            at,
            storage and not shapes.SUBDOMAIN.fullmatch(storage),
            f"spec.storageClassName {storage!r} is no name",
        ),
    ]


def _lint_service(spec: Object, at: str) -> Found:
    lacks = not spec.get("ports") and spec.get("clusterIP") != "None"
    numbers = [one.get("port") for one in spec.get("ports", ())]
    return [
        *_lint_labels(spec.get("selector", {}), f"{at}.spec.selector"),
        *_error(at, lacks, "spec.ports is required, but for a headless Service", "clusterIP: None"),
        *_refuse(at, numbers, _is_port, "spec.ports: {!r} is no port"),
    ]


def _is_port(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 65535


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _lint_job(job: Object, name: str, at: str, server: str) -> Found:
    version = parse_version(server)
    dropped = [f for f, since in shapes.SINCE.items() if f in job and version < since]
    pod = job.get("template", {}).get("spec", {})
    policy, mode = pod.get("restartPolicy"), job.get("completionMode")
    indexed, known = mode == "Indexed", mode in (None, "Indexed", "NonIndexed")
    endless = indexed and job.get("completions") is None
    last = f"{name}-{max(0, _count(job, 'completions') - 1)}"
    unnamed = indexed and not shapes.LABEL.fullmatch(last)
    selects = "selector" in job and not job.get("manualSelector")
    return [
        *_lint_fields(job, shapes.JOB, at),
        *(
            one
            for field in dropped
            for one in _error(
                at,
                True,
                f"{field}: a server {server} drops it; it is there from "
                f"{'.'.join(map(str, shapes.SINCE[field]))} on",
                "kubernetes.server is the server's version",
            )
        ),
        *_error(
            f"{at}.template.spec",
            policy not in ("Never", "OnFailure"),
            f"restartPolicy {policy or 'Always'}: a Job takes Never or OnFailure",
            "Never",
            "K8S2",
        ),
        *(
            one
            for field in shapes.COUNTS
            if (value := job.get(field)) is not None
            for one in _refuse(at, [value], _is_count, f"{field}: {{!r}} is no number from 0 on")
        ),
        *_error(at, not known, f"completionMode {mode!r}: Indexed or NonIndexed"),
        *_error(at, endless, "completionMode Indexed: completions is required"),
        *_error(at, unnamed, f"the host name {last} of an indexed pod is no DNS label"),
        *_error(at, selects, "selector: made by the server", "leave it out"),
        *_lint_failure_policy(job, pod, f"{at}.podFailurePolicy"),
    ]


def _lint_pytorchjob(document: Object, documents: Sequence[Object], at: str) -> Found:
    """Return what the Training Operator refuses, and what is wrong with the pods of each role."""
    spec, name = document.get("spec") or {}, _read_name(document)
    run, roles = spec.get("runPolicy") or {}, spec.get("pytorchReplicaSpecs") or {}
    pods = sum(_count(one, "replicas") for one in roles.values())
    found = [
        *_lint_fields(spec, shapes.PYTORCHJOB, at),
        *_lint_fields(run, shapes.RUN_POLICY, f"{at}.runPolicy"),
        *_error(at, not shapes.SERVICE.fullmatch(name), f"metadata.name {name!r} names no Service"),
        *_error(at, "Master" not in roles, "pytorchReplicaSpecs: Master is required"),
    ]
    for role, replica in roles.items():
        where, template = f"{at}.pytorchReplicaSpecs.{role}", replica.get("template") or {}
        pod, policy = template.get("spec") or {}, replica.get("restartPolicy", "OnFailure")
        count, names = (
            replica.get("replicas", 1),
            [c.get("name") for c in pod.get("containers", ())],
        )
        found += [
            *_lint_fields(replica, shapes.REPLICA, where),
            *_error(where, role not in ("Master", "Worker"), "a role is Master or Worker"),
            *_error(where, role == "Master" and count != 1, f"replicas {count!r}: a Master is one"),
            *_error(where, not _is_count(count) or count == 0, f"replicas {count!r}"),
            *_error(where, "pytorch" not in names, "no container is called pytorch"),
            *_error(where, policy not in _REPLICA_POLICIES, f"restartPolicy {policy!r}"),
            *_warning(
                f"{where}.template.spec",
                pod.get("restartPolicy"),
                "restartPolicy: the operator overwrites it by that of the replica",
            ),
            *_lint_pod({"parallelism": pods, "template": template}, documents,
                       f"{where}.template.spec"),
        ]  # fmt: skip
    return found


_REPLICA_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")


def _count(job: Object, field: str) -> int:
    """Return how many pods a Job asks for; 1 where that is not said, or is no number."""
    value = job.get(field)
    return value if type(value) is int else 1


def _lint_failure_policy(job: Object, pod: Object, at: str) -> Found:
    policy = job.get("podFailurePolicy")
    if policy is None:
        return []
    rules, never = policy.get("rules", ()), pod.get("restartPolicy") == "Never"
    names = {c.get("name") for c in (*pod.get("initContainers", ()), *pod.get("containers", ()))}
    found = [
        *_error(at, not never, "only with restartPolicy: Never"),
        *_error(at, not 1 <= len(rules) <= 20, f"{len(rules)} rules: 1 to 20"),
    ]
    for number, rule in enumerate(rules):
        where, action = f"{at}.rules[{number}]", rule.get("action")
        known = action in ("FailJob", "FailIndex", "Ignore", "Count")
        single = action == "FailIndex" and job.get("backoffLimitPerIndex") is None
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        one = bool(exits) != bool(conditions)
        found += [
            *_error(where, not known, f"action {action!r}: FailJob, FailIndex, Ignore or Count"),
            *_error(where, single, "FailIndex: backoffLimitPerIndex is required"),
            *_error(where, not one, "one of onExitCodes and onPodConditions"),
            *(_lint_exit_codes(exits, names, where) if exits else ()),
        ]
    return found


def _lint_exit_codes(exits: Object, names: set[Any], at: str) -> Found:
    values, operator = list(exits.get("values", ())), exits.get("operator")
    name = exits.get("containerName")
    return [
        *_error(at, operator not in ("In", "NotIn"), f"operator {operator!r}: In or NotIn"),
        *_error(at, not 1 <= len(values) <= 255, "values: 1 to 255 exit codes"),
        *_error(at, values != sorted(set(values)), "values: in order, and none twice"),
        *_error(at, operator == "In" and 0 in values, "values: 0 is no failure"),
        *_error(at, name not in (None, *names), f"containerName: no container {name!r}"),
    ]


def _lint_pod(job: Object, documents: Sequence[Object], at: str) -> Found:
    pod = job.get("template", {}).get("spec", {})
    labels = job.get("template", {}).get("metadata", {}).get("labels", {})
    grace = pod.get("terminationGracePeriodSeconds", 30)
    lone = pod.get("dnsPolicy") == "None" and not pod.get("dnsConfig")
    refused = find_violations(pod)
    return [
        *_lint_fields(pod, shapes.POD, at),
        *_lint_labels(labels, f"{at.removesuffix('.spec')}.metadata.labels"),
        *_lint_labels(pod.get("nodeSelector", {}), f"{at}.nodeSelector"),
        *(
            one
            for field in sorted(shapes.SWITCHES & pod.keys())
            for one in _refuse(
                at, [pod[field]], _is_switch, f"{field}: {{!r}} is neither true nor false"
            )
        ),
        *(
            one
            for field in ("hostname", "subdomain")
            if field in pod
            for one in _refuse(at, [pod[field]], _is_label, f"{field} {{!r}} is no DNS label")
        ),
        *_error(at, lone, "dnsPolicy None: dnsConfig is required"),
        *_refuse(at, [grace], _is_count, "terminationGracePeriodSeconds: {!r}"),
        *_warning(
            at,
            type(grace) is int and grace == 0,
            "terminationGracePeriodSeconds 0: killed without a checkpoint",
        ),
        *_lint_each(pod, "tolerations", at, _lint_toleration),
        *_lint_subdomain(pod.get("subdomain"), labels, documents, at),
        *_lint_containers(pod, at),
        *_warning(
            at,
            refused,
            "a namespace that enforces `restricted` refuses it: "
            + name_first(refused, between="; "),
            "Pod Security Standards",
        ),
        *_lint_storage(job, pod, documents, at),
    ]


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_label(value: Any) -> bool:
    return shapes.LABEL.fullmatch(str(value)) is not None


def _lint_each(owner: Object, field: str, at: str, lint: Callable[[Object, str], Found]) -> Found:
    """Return what is wrong with the parts of a list, each with its place in it."""
    parts = enumerate(owner.get(field, ()))
    return [one for number, part in parts for one in lint(part, f"{at}.{field}[{number}]")]


def _lint_subdomain(subdomain: Any, labels: Object, documents: Sequence[Object], at: str) -> Found:
    """Return whether the Service of the pods' subdomain is there, and selects them."""
    services = [document for document in documents if document.get("kind") == "Service"]
    if subdomain is None or not services:
        return []
    named = [one for one in services if one.get("metadata", {}).get("name") == subdomain]
    selector = named[0].get("spec", {}).get("selector", {}) if named else {}
    lost = any(labels.get(key) != value for key, value in selector.items())
    return [
        *_warning(at, not named, f"subdomain {subdomain}: no Service of that name here"),
        *_warning(at, lost, f"Service {subdomain} does not select these pods"),
    ]


def _lint_toleration(one: Object, at: str) -> Found:
    operator, effect = one.get("operator", "Equal"), one.get("effect")
    known, exists = operator in ("Exists", "Equal", "Lt", "Gt"), operator == "Exists"
    timed = one.get("tolerationSeconds") is not None and effect != "NoExecute"
    return [
        *_lint_fields(one, shapes.TOLERATION, at),
        *_error(at, not known, f"operator {operator!r}: Exists or Equal"),
        *_error(at, exists and one.get("value"), "value must be empty where operator is Exists"),
        *_error(
            at, not (one.get("key") or exists), "operator must be Exists where there is no key"
        ),
        *_error(at, effect not in (None, "", *shapes.EFFECTS), f"effect {effect!r}"),
        *_error(at, timed, "tolerationSeconds: only where effect is NoExecute"),
    ]


def _lint_storage(job: Object, pod: Object, documents: Sequence[Object], at: str) -> Found:
    """Return whether what is written outlives the pod, and several pods can share it."""
    volumes, pods = pod.get("volumes", ()), _count(job, "parallelism")
    sources = [volume.get("persistentVolumeClaim") for volume in volumes]
    used = [one.get("claimName", "") for one in sources if isinstance(one, Mapping)]
    lasting = used or any(volume.get("nfs") or volume.get("csi") for volume in volumes)
    modes = {
        _read_name(document): document.get("spec", {}).get("accessModes", ())
        for document in documents
        if document.get("kind") == "PersistentVolumeClaim"
    }
    return [
        *_warning(
            at,
            not lasting,
            "no volume outlives the pod: checkpoints go with it",
            "mount a PersistentVolumeClaim at DURABLE_DIR",
            "K8S5",
        ),
        *(
            one
            for name in used
            if pods > 1 and name in modes
            for one in _error(
                at,
                "ReadWriteMany" not in modes[name],
                f"{pods} pods share the claim {name}, which is "
                f"{', '.join(map(str, modes[name]))}: pods on other nodes wait for ever",
                "accessModes: [ReadWriteMany]",
                "K8S4",
            )
        ),
    ]


def _lint_containers(pod: Object, at: str) -> Found:
    """Return what is wrong with the containers and volumes of a pod."""
    containers: Sequence[Object] = pod.get("containers", ())
    volumes = Counter(str(volume.get("name", "")) for volume in pod.get("volumes", ()))
    found = [
        *_error(at, not containers, "containers: at least one is required"),
        *_refuse(at, sorted(volumes), lambda name: volumes[name] == 1, "volumes: {!r} twice"),
        *_lint_each(pod, "volumes", at, _lint_volume),
    ]
    names: list[str] = []
    for number, container in enumerate((*containers, *pod.get("initContainers", ()))):
        where, name = f"{at}.containers[{number}]", container.get("name")
        found += _error(where, name in names, f"name {name!r} twice")
        found += _lint_container(container, volumes, where)
        names.append(str(container.get("name", "")))
    return found


def _lint_volume(volume: Object, at: str) -> Found:
    name, claim = str(volume.get("name", "")), volume.get("persistentVolumeClaim")
    sources = [key for key in volume if key != "name"]
    unnamed = isinstance(claim, Mapping) and not claim.get("claimName")
    found = [
        *_lint_fields(volume, shapes.VOLUME, at),
        *_refuse(at, [name], _is_label, "name {!r} is no DNS label"),
        *_error(at, len(sources) > 1, f"one source, not {', '.join(sources)}"),
        *_error(at, unnamed, "persistentVolumeClaim.claimName is required"),
    ]
    if (folder := volume.get("emptyDir")) is None:
        return found
    size, medium = folder.get("sizeLimit"), folder.get("medium", "")
    odd = size is not None and shapes.read_quantity(size) is None
    known = medium in ("", "Memory") or str(medium).startswith("HugePages")
    return [
        *found,
        *_error(at, odd, f"emptyDir.sizeLimit: {size!r} is no quantity", "such as 8Gi"),
        *_warning(
            at,
            size is None,
            "emptyDir without sizeLimit may fill the node",
            "emptyDir.sizeLimit",
            "K8S5",
        ),
        *_error(at, not known, f"emptyDir.medium {medium!r}: Memory, or none"),
    ]


def _lint_container(container: Object, volumes: Container[str], at: str) -> Found:
    name, image = str(container.get("name", "")), str(container.get("image", ""))
    named, policy = image and image == image.strip(), container.get("imagePullPolicy", "Always")
    found = [
        *_lint_fields(container, shapes.CONTAINER, at),
        *_error(at, not shapes.LABEL.fullmatch(name), f"name {name!r} is no DNS label"),
        *_error(at, not named, f"image {image!r}" if image else "image is required"),
        *_warning(
            at,
            named and "@sha256:" not in image,
            f"image {image} by tag: another may come by that name",
            "name@sha256:...",
            "U30",
        ),
        *_error(
            at, policy not in ("Always", "IfNotPresent", "Never"), f"imagePullPolicy {policy!r}"
        ),
    ]
    found += _lint_each(container, "env", at, _lint_variable)
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts", ())):
        where, path = f"{at}.volumeMounts[{number}]", str(mount.get("mountPath", ""))
        found += [
            *_lint_fields(mount, shapes.MOUNT, where),
            *_error(where, not path, "mountPath is required"),
            *_error(where, path and path in paths, f"mountPath {path} twice"),
            *_error(where, mount.get("name") not in volumes, f"no volume {mount.get('name')!r}"),
        ]
        paths.append(path)
    return [
        *found,
        *_warning(
            at,
            "/dev/shm" not in paths,
            "/dev/shm is the runtime's 64 MB: loader workers die of it",
            "emptyDir with medium: Memory at /dev/shm",
            "U9",
        ),
        *_lint_resources(container.get("resources", {}), f"{at}.resources"),
    ]


def _lint_variable(one: Object, at: str) -> Found:
    name, value, source = str(one.get("name", "")), one.get("value"), one.get("valueFrom")
    plain, sourced = value is None or isinstance(value, str), source is not None
    return [
        *_lint_fields(one, shapes.ENV, at),
        *_error(at, not shapes.VARIABLE.fullmatch(name), f"name {name!r} is no name of a variable"),
        *_lint_fields(source or {}, shapes.VALUE_FROM, f"{at}.valueFrom"),
        *_error(at, sourced and value, "value and valueFrom"),
        *_error(at, sourced and len(source or ()) != 1, "valueFrom: one source"),
        *_error(at, not plain, f"value {value!r} is no string", "put it in quotes"),
    ]


def _lint_resources(resources: Object, at: str) -> Found:
    found = _lint_fields(resources, shapes.RESOURCES, at)
    sizes: dict[tuple[str, str], float] = {}
    for part in ("limits", "requests"):
        where = f"{at}.{part}"
        for name, value in (resources.get(part) or {}).items():
            size, device = shapes.read_quantity(value), "/" in name
            if size is None:
                text = f"{name}: {value!r} is no quantity"
                found += _error(where, True, text, "such as 500m, 16Gi")
                continue
            sizes[part, name] = size
            broken = device and size != int(size)
            known = device or name in _NATIVE or name.startswith("hugepages-")
            mend = "a device's name has a domain: nvidia.com/gpu"
            found += [
                *_error(where, size < 0, f"{name}: {value} is negative"),
                *_error(where, broken, f"{name}: {value} is no integer: a GPU is not shared"),
                *_error(where, not known, f"no resource {name!r}", mend),
            ]
    return [
        *found,
        *_compare(sizes, at),
        *_warning(
            at,
            ("limits", "ephemeral-storage") not in sizes,
            "no limit of ephemeral-storage: a full disk of the node may evict this pod",
            "set one",
            "K8S5",
        ),
    ]


def _compare(sizes: Mapping[tuple[str, str], float], at: str) -> Found:
    """Return where requests do not go with limits."""
    found, mend = [], "GPUs go into limits only"
    for name, size in ((name, size) for (part, name), size in sizes.items() if part == "requests"):
        limit = sizes.get(("limits", name))
        if limit is None:
            found += _error(at, "/" in name, f"{name}: a request without a limit", mend)
        elif "/" in name:
            text = f"{name}: request {size:g}, limit {limit:g}: must be equal"
            found += _error(at, size != limit, text, mend)
        else:
            found += _error(at, size > limit, f"{name}: the request is above the limit")
    return found


def check_profile(spec: JobSpec, profile: Profile) -> Found:
    """Return what a person should know that the manifests alone do not show."""
    section, nodes, url = profile.kubernetes, spec.num_nodes, spec.checkpoint.url
    mode, durable = choose_mount_mode(spec, section), profile.overrides.DURABLE_DIR
    older, pytorch = parse_version(section.server) < FAILURE_POLICY, section.shape == "pytorchjob"
    counted = older or pytorch or section.restart_policy != "Never"
    return [
        *explain_security(section),
        *error(
            section.grace_s <= section.checkpoint_s,
            f"{section.grace_s} s of grace, and a checkpoint takes {section.checkpoint_s} s",
            "kubernetes.grace_s",
        ),
        *error(
            nodes > 1 and not section.storage and mode != "ReadWriteMany",
            f"{nodes} nodes and a claim that is {mode}: the others wait for ever",
            'kubernetes.access_mode = "ReadWriteMany"',
            "K8S4",
        ),
        *note(
            section.active_deadline_s,
            "past active_deadline_s the server deletes the pods, their logs and exit codes",
            "perdure's own logs are on the volume",
        ),
        *warning(
            counted and section.shape in ("job", "pytorchjob"),
            f"preemptions count as failures, of which {section.backoff_limit} end the Job",
            "kubernetes.backoff_limit",
        ),
        *warning(
            pytorch,
            "a PyTorchJob ends after 3 and 75 as after a failure of the script: another pod is "
            "tried only where one was killed, or left on notice",
            'kubernetes.shape = "trainjob" or "job" on a server from 1.26',
        ),
        *warning(
            pytorch and nodes > 1 and section.security == "restricted",
            "the Training Operator adds an init container to workers, which has no "
            "securityContext: a namespace that enforces `restricted` refuses them",
            "Pod Security Standards",
        ),
        *error(
            spec.growth and section.shape != "job",
            f"nodes_max: pods are added beside a Job, and not to a {section.shape}",
            'kubernetes.shape = "job"',
        ),
        *warning(
            section.project and spec.launch.outputs,
            f"launch.outputs are in the image, at {section.project}: they go with the pod",
            'write them to DURABLE_DIR, or send the project (kubernetes.project = "")',
            "K8S5",
        ),
        *error(
            url.startswith("/") and not f"{url}/".startswith(f"{durable}/"),
            f"checkpoint.url = {url} is not on the volume at {durable}: it goes with the pod",
            "leave it out, or name a place on the volume",
            "K8S5",
        ),
    ]
