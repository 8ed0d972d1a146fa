"""The linter's part for containers and volumes of a pod: resources, mounts, variables, images."""

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.launch.kubernetes import shapes
from perdure.model.platforms.launching import Finding

Object = Mapping[str, Any]
_NATIVE = ("cpu", "memory", "ephemeral-storage", "storage", "pods")


def lint_containers(pod: Object, at: str) -> list[Finding]:
    """Return what is wrong with the containers and volumes of a pod."""
    containers: Sequence[Object] = pod.get("containers", ())
    found: list[Finding] = []
    if not containers:
        found.append(_error(at, "containers: at least one is required"))
    volumes: list[str] = [str(volume.get("name", "")) for volume in pod.get("volumes", ())]
    for name in sorted({name for name in volumes if volumes.count(name) > 1}):
        found.append(_error(at, f"volumes: {name!r} twice"))
    for number, volume in enumerate(pod.get("volumes", ())):
        found += _lint_volume(volume, f"{at}.volumes[{number}]")
    names: list[str] = []
    for number, container in enumerate((*containers, *pod.get("initContainers", ()))):
        where = f"{at}.containers[{number}]"
        if container.get("name") in names:
            found.append(_error(where, f"name {container['name']!r} twice"))
        names.append(str(container.get("name", "")))
        found += _lint_container(container, volumes, where)
    return found


def _error(at: str, text: str, hint: str = "", trap: str = "") -> Finding:
    return Finding("error", f"{at}: {text}", hint, trap)


def _warning(at: str, text: str, hint: str = "", trap: str = "") -> Finding:
    return Finding("warning", f"{at}: {text}", hint, trap)


def _unknown(value: Object, known: frozenset[str], at: str) -> list[Finding]:
    return [_error(at, f"unknown field {key}") for key in value if key not in known]


def _lint_volume(volume: Object, at: str) -> list[Finding]:
    found = _unknown(volume, shapes.VOLUME, at)
    name = str(volume.get("name", ""))
    if not shapes.LABEL.fullmatch(name):
        found.append(_error(at, f"name {name!r} is no DNS label"))
    sources = [key for key in volume if key != "name"]
    if len(sources) > 1:
        found.append(_error(at, f"one source, not {', '.join(sources)}"))
    claim = volume.get("persistentVolumeClaim")
    if isinstance(claim, Mapping) and not claim.get("claimName"):
        found.append(_error(at, "persistentVolumeClaim.claimName is required"))
    if (folder := volume.get("emptyDir")) is None:
        return found
    size = folder.get("sizeLimit")
    if size is not None and shapes.read_quantity(size) is None:
        found.append(_error(at, f"emptyDir.sizeLimit: {size!r} is no quantity", "such as 8Gi"))
    if size is None:
        found.append(_warning(at, "emptyDir without sizeLimit may fill the node",
                              "emptyDir.sizeLimit", "K8S5"))  # fmt: skip
    if folder.get("medium", "") not in ("", "Memory") and not str(folder["medium"]).startswith(
        "HugePages"
    ):
        found.append(_error(at, f"emptyDir.medium {folder['medium']!r}: Memory, or none"))
    return found


def _lint_container(container: Object, volumes: Sequence[str], at: str) -> list[Finding]:
    found = _unknown(container, shapes.CONTAINER, at)
    name, image = str(container.get("name", "")), str(container.get("image", ""))
    if not shapes.LABEL.fullmatch(name):
        found.append(_error(at, f"name {name!r} is no DNS label"))
    if not image or image != image.strip():
        found.append(_error(at, f"image {image!r}" if image else "image is required"))
    elif "@sha256:" not in image:
        found.append(_warning(at, f"image {image} by tag: another may come by that name",
                              "name@sha256:...", "U30"))  # fmt: skip
    if container.get("imagePullPolicy", "Always") not in ("Always", "IfNotPresent", "Never"):
        found.append(_error(at, f"imagePullPolicy {container['imagePullPolicy']!r}"))
    for number, one in enumerate(container.get("env", ())):
        found += _lint_variable(one, f"{at}.env[{number}]")
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts", ())):
        where = f"{at}.volumeMounts[{number}]"
        found += _unknown(mount, shapes.MOUNT, where)
        path = str(mount.get("mountPath", ""))
        if not path:
            found.append(_error(where, "mountPath is required"))
        if path and path in paths:
            found.append(_error(where, f"mountPath {path} twice"))
        paths.append(path)
        if mount.get("name") not in volumes:
            found.append(_error(where, f"no volume {mount.get('name')!r}"))
    if "/dev/shm" not in paths:
        found.append(_warning(at, "/dev/shm is the runtime's 64 MB: loader workers die of it",
                              "emptyDir with medium: Memory at /dev/shm", "U9"))  # fmt: skip
    return found + _lint_resources(container.get("resources", {}), f"{at}.resources")


def _lint_variable(one: Object, at: str) -> list[Finding]:
    found = _unknown(one, shapes.ENV, at)
    name = str(one.get("name", ""))
    if not shapes.VARIABLE.fullmatch(name):
        found.append(_error(at, f"name {name!r} is no name of a variable"))
    source = one.get("valueFrom")
    if source is not None:
        found += _unknown(source, shapes.VALUE_FROM, f"{at}.valueFrom")
        if one.get("value"):
            found.append(_error(at, "value and valueFrom"))
        if len(source) != 1:
            found.append(_error(at, "valueFrom: one source"))
    if one.get("value") is not None and not isinstance(one["value"], str):
        found.append(_error(at, f"value {one['value']!r} is no string", "put it in quotes"))
    return found


def _lint_resources(resources: Object, at: str) -> list[Finding]:
    found = _unknown(resources, shapes.RESOURCES, at)
    sizes: dict[tuple[str, str], float] = {}
    for part in ("limits", "requests"):
        for name, value in (resources.get(part) or {}).items():
            size = shapes.read_quantity(value)
            if size is None:
                found.append(_error(f"{at}.{part}", f"{name}: {value!r} is no quantity",
                                    "such as 500m, 16Gi"))  # fmt: skip
                continue
            sizes[part, name] = size
            if size < 0:
                found.append(_error(f"{at}.{part}", f"{name}: {value} is negative"))
            if "/" in name and size != int(size):
                found.append(_error(f"{at}.{part}", f"{name}: {value} is no integer: a GPU is not "
                                    "shared"))  # fmt: skip
            if "/" not in name and name not in _NATIVE and not name.startswith("hugepages-"):
                found.append(_error(f"{at}.{part}", f"no resource {name!r}",
                                    "a device's name has a domain: nvidia.com/gpu"))  # fmt: skip
    found += _compare(sizes, at)
    if ("limits", "ephemeral-storage") not in sizes:
        found.append(_warning(at, "no limit of ephemeral-storage: a full disk of the node "
                              "may evict this pod", "set one", "K8S5"))  # fmt: skip
    return found


def _compare(sizes: Mapping[tuple[str, str], float], at: str) -> list[Finding]:
    """Return where requests do not go with limits."""
    found = []
    for (part, name), size in sizes.items():
        limit = sizes.get(("limits", name))
        if part != "requests":
            continue
        if "/" in name and limit is None:
            found.append(_error(at, f"{name}: a request without a limit",
                                "GPUs go into limits only"))  # fmt: skip
        elif "/" in name and size != limit:
            found.append(_error(at, f"{name}: request {size:g}, limit {limit:g}: must be equal",
                                "GPUs go into limits only"))  # fmt: skip
        elif limit is not None and size > limit:
            found.append(_error(at, f"{name}: the request is above the limit"))
    return found
