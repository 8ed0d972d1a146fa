"""JobSet, TrainJob and PyTorchJob against the schemas that their projects publish.

The schemas are trimmed (`crds/`); what a controller says beyond its schema nobody says here. The
specs of pods are open in them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.unit.launch.test_kubernetes import documents, make_plan

CRDS = {
    found["kind"]: found
    for found in (
        json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("crds/*.json"))
    )
}


def close(schema: Any) -> Any:
    """Return a schema in which a field that it does not name is none, as a strict server has it."""
    if isinstance(schema, list):
        return [close(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def find_faults(document: Any) -> list[str]:
    """Return what the schema of a document's kind says against it."""
    crd = CRDS[document["kind"]]
    schema = close(crd["schema"])
    # Metadata is the server's own affair, and open in every schema.
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(schema)
    wrong = [f"{one.json_path}: {one.message}" for one in validator.iter_errors(document)]
    api = f"{crd['group']}/{crd['version']}"
    return wrong + ([] if document["apiVersion"] == api else [f"apiVersion is {api}"])


def list_customs(shape: str, nodes: int = 3, **section: Any) -> Iterator[Any]:
    """Yield the documents of a plan that are none of Kubernetes' own."""
    plan = make_plan(nodes, gpus=2, shape=shape, server="1.31", **section)
    assert [one for one in plan.findings if one.level == "error"] == []
    return (one for one in documents(plan).values() if one["kind"] in CRDS)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("limits", [{}, {"active_deadline_s": 3600, "ttl_s": 60}])
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [("jobset", {"JobSet"}), ("trainjob", {"TrainingRuntime", "TrainJob"}),
     ("pytorchjob", {"PyTorchJob"})],
)  # fmt: skip
def test_what_is_rendered_is_of_the_schema(
    shape: str, kinds: set[str], nodes: int, limits: dict[str, int]
) -> None:
    found = list(list_customs(shape, nodes, **limits))
    assert {one["kind"] for one in found} == kinds
    assert [fault for one in found for fault in find_faults(one)] == []


def change(document: Any, path: str, value: Any) -> Any:
    """Return a document with another value at a place."""
    changed = json.loads(json.dumps(document))
    *above, last = path.split(".")
    there = changed
    for name in above:
        there = there[int(name)] if isinstance(there, list) else there[name]
    there[last] = value
    return changed


@pytest.mark.parametrize(
    ("shape", "kind", "path", "value"),
    [
        ("jobset", "JobSet", "spec.replicatedJobs.0.replicas", "one"),
        ("jobset", "JobSet", "spec.replicatedJobs.0.template.spec.paralelism", 3),
        ("jobset", "JobSet", "spec.successPolicy", {"operator": "Some"}),
        ("trainjob", "TrainJob", "spec.trainer.numNodes", "3"),
        ("trainjob", "TrainJob", "spec.runtimeRef", {"kind": "TrainingRuntime"}),
        ("trainjob", "TrainJob", "spec.modelConfig", {}),
        ("trainjob", "TrainingRuntime", "spec.mlPolicy.nodes", 3),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Master.restartPolicy", 1),
        ("pytorchjob", "PyTorchJob", "spec.backoffLimit", 3),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs", None),
    ],
)
def test_the_schemas_see_what_is_wrong(shape: str, kind: str, path: str, value: Any) -> None:
    (found,) = (one for one in list_customs(shape) if one["kind"] == kind)
    assert find_faults(change(found, path, value))


def test_a_pytorchjob_has_a_master_and_workers_that_join_it() -> None:
    plan = make_plan(3, shape="pytorchjob")
    spec = documents(plan)["PyTorchJob/gpt"]["spec"]
    roles = {}
    for role, replica in spec["pytorchReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        roles[role] = (replica["replicas"], container["name"], env["PERDURE_POD_ROLE"])
        assert replica["template"]["metadata"]["labels"]["perdure.dev/job"] == "gpt"
        assert replica["restartPolicy"] == "ExitCode"
    assert roles == {"Master": (1, "pytorch", "first"), "Worker": (2, "pytorch", "node")}
    assert any("starts another pod only" in one.text for one in plan.findings)
    alone = documents(make_plan(1, shape="pytorchjob"))["PyTorchJob/gpt"]["spec"]
    assert list(alone["pytorchReplicaSpecs"]) == ["Master"]
    text = make_plan(3, shape="pytorchjob").files["job.yaml"]
    assert [one["kind"] for one in yaml.safe_load_all(text)] == ["ConfigMap", "PyTorchJob"]
