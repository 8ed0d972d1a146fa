"""The linter's part for containers and volumes of a pod: resources, mounts, variables, images."""

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.launch.kubernetes import shapes
from perdure.model.platforms.launching import Finding
from perdure.traps import findings

Object = Mapping[str, Any]
_NATIVE = ("cpu", "memory", "ephemeral-storage", "storage", "pods")


def error(at: str, when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return what is refused in a place of a manifest, or cannot train; see `traps.findings`."""
    return findings.error(when, f"{at}: {text}", hint, trap)


def warning(at: str, when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return what runs and may lose what it did; see `traps.findings`."""
    return findings.warning(when, f"{at}: {text}", hint, trap)


def lint_fields(value: Object, known: frozenset[str], at: str) -> list[Finding]:
    """Return the fields that no server knows."""
    return [one for key in value for one in error(at, key not in known, f"unknown field {key}")]


def lint_containers(pod: Object, at: str) -> list[Finding]:
    """Return what is wrong with the containers and volumes of a pod."""
    containers: Sequence[Object] = pod.get("containers", ())
    volumes = [str(volume.get("name", "")) for volume in pod.get("volumes", ())]
    found = error(at, not containers, "containers: at least one is required")
    for name in sorted(set(volumes)):
        found += error(at, volumes.count(name) > 1, f"volumes: {name!r} twice")
    for number, volume in enumerate(pod.get("volumes", ())):
        found += _lint_volume(volume, f"{at}.volumes[{number}]")
    names: list[str] = []
    for number, container in enumerate((*containers, *pod.get("initContainers", ()))):
        where, name = f"{at}.containers[{number}]", container.get("name")
        found += error(where, name in names, f"name {name!r} twice")
        found += _lint_container(container, volumes, where)
        names.append(str(container.get("name", "")))
    return found


def _lint_volume(volume: Object, at: str) -> list[Finding]:
    name, claim = str(volume.get("name", "")), volume.get("persistentVolumeClaim")
    sources = [key for key in volume if key != "name"]
    unnamed = isinstance(claim, Mapping) and not claim.get("claimName")
    found = [
        *lint_fields(volume, shapes.VOLUME, at),
        *error(at, not shapes.LABEL.fullmatch(name), f"name {name!r} is no DNS label"),
        *error(at, len(sources) > 1, f"one source, not {', '.join(sources)}"),
        *error(at, unnamed, "persistentVolumeClaim.claimName is required"),
    ]
    if (folder := volume.get("emptyDir")) is None:
        return found
    size, medium = folder.get("sizeLimit"), folder.get("medium", "")
    odd = size is not None and shapes.read_quantity(size) is None
    known = medium in ("", "Memory") or str(medium).startswith("HugePages")
    endless = "emptyDir without sizeLimit may fill the node"
    return [
        *found,
        *error(at, odd, f"emptyDir.sizeLimit: {size!r} is no quantity", "such as 8Gi"),
        *warning(at, size is None, endless, "emptyDir.sizeLimit", "K8S5"),
        *error(at, not known, f"emptyDir.medium {medium!r}: Memory, or none"),
    ]


def _lint_container(container: Object, volumes: Sequence[str], at: str) -> list[Finding]:
    name, image = str(container.get("name", "")), str(container.get("image", ""))
    named, policy = image and image == image.strip(), container.get("imagePullPolicy", "Always")
    found = [
        *lint_fields(container, shapes.CONTAINER, at),
        *error(at, not shapes.LABEL.fullmatch(name), f"name {name!r} is no DNS label"),
        *error(at, not named, f"image {image!r}" if image else "image is required"),
        *warning(
            at,
            named and "@sha256:" not in image,
            f"image {image} by tag: another may come by that name",
            "name@sha256:...",
            "U30",
        ),
        *error(
            at, policy not in ("Always", "IfNotPresent", "Never"), f"imagePullPolicy {policy!r}"
        ),
    ]
    for number, one in enumerate(container.get("env", ())):
        found += _lint_variable(one, f"{at}.env[{number}]")
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts", ())):
        where, path = f"{at}.volumeMounts[{number}]", str(mount.get("mountPath", ""))
        found += [
            *lint_fields(mount, shapes.MOUNT, where),
            *error(where, not path, "mountPath is required"),
            *error(where, path and path in paths, f"mountPath {path} twice"),
            *error(where, mount.get("name") not in volumes, f"no volume {mount.get('name')!r}"),
        ]
        paths.append(path)
    small = "/dev/shm is the runtime's 64 MB: loader workers die of it"
    mend = "emptyDir with medium: Memory at /dev/shm"
    found += warning(at, "/dev/shm" not in paths, small, mend, "U9")
    return found + _lint_resources(container.get("resources", {}), f"{at}.resources")


def _lint_variable(one: Object, at: str) -> list[Finding]:
    name, value, source = str(one.get("name", "")), one.get("value"), one.get("valueFrom")
    plain, sourced = value is None or isinstance(value, str), source is not None
    return [
        *lint_fields(one, shapes.ENV, at),
        *error(at, not shapes.VARIABLE.fullmatch(name), f"name {name!r} is no name of a variable"),
        *lint_fields(source or {}, shapes.VALUE_FROM, f"{at}.valueFrom"),
        *error(at, sourced and value, "value and valueFrom"),
        *error(at, sourced and len(source or ()) != 1, "valueFrom: one source"),
        *error(at, not plain, f"value {value!r} is no string", "put it in quotes"),
    ]


def _lint_resources(resources: Object, at: str) -> list[Finding]:
    found = lint_fields(resources, shapes.RESOURCES, at)
    sizes: dict[tuple[str, str], float] = {}
    for part in ("limits", "requests"):
        where = f"{at}.{part}"
        for name, value in (resources.get(part) or {}).items():
            size, device = shapes.read_quantity(value), "/" in name
            if size is None:
                odd = f"{name}: {value!r} is no quantity"
                found += error(where, True, odd, "such as 500m, 16Gi")
                continue
            sizes[part, name] = size
            whole = f"{name}: {value} is no integer: a GPU is not shared"
            known = device or name in _NATIVE or name.startswith("hugepages-")
            mend = "a device's name has a domain: nvidia.com/gpu"
            found += error(where, size < 0, f"{name}: {value} is negative")
            found += error(where, device and size != int(size), whole)
            found += error(where, not known, f"no resource {name!r}", mend)
    limited = ("limits", "ephemeral-storage") in sizes
    full = "no limit of ephemeral-storage: a full disk of the node may evict this pod"
    return [*found, *_compare(sizes, at), *warning(at, not limited, full, "set one", "K8S5")]


def _compare(sizes: Mapping[tuple[str, str], float], at: str) -> list[Finding]:
    """Return where requests do not go with limits."""
    found, mend = [], "GPUs go into limits only"
    for (part, name), size in sizes.items():
        limit = sizes.get(("limits", name))
        if part != "requests":
            continue
        if limit is None:
            found += error(at, "/" in name, f"{name}: a request without a limit", mend)
        elif "/" in name:
            text = f"{name}: request {size:g}, limit {limit:g}: must be equal"
            found += error(at, size != limit, text, mend)
        else:
            found += error(at, size > limit, f"{name}: the request is above the limit")
    return found
