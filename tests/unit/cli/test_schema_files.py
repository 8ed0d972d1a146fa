"""The schemas of files are what the code says, and what perdure takes they take.

After a change of a field: `UPDATE_GOLDEN=1 pytest tests/unit/cli/test_schema_files.py`.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perdure.cli.app import run_command
from perdure.cli.looking.schema import SCHEMAS, make_file_schema, make_schema_line
from perdure.launch.catalog import SHIPPED
from perdure.model.job import JobSpec

ROOT = Path(__file__).resolve().parents[3]
JOB_FILES = sorted(
    path
    for folder in ("examples", "docs", "bench", "tests")
    for path in (ROOT / folder).rglob("*.toml")
    if "script" in tomllib.loads(path.read_text())
)


@pytest.fixture(scope="module", params=["job", "profile"])
def what(request) -> str:
    return request.param


def judge(what: str, document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(make_file_schema(what))
    return [error.message for error in validator.iter_errors(document)]


def test_what_is_shipped_is_what_the_code_says(what, capsys) -> None:
    assert run_command(["doctor", "--schema", what]) == 0
    text = capsys.readouterr().out
    shipped = SCHEMAS / f"{what}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        shipped.write_text(text)
    assert shipped.read_text() == text, "UPDATE_GOLDEN=1 pytest tests/unit/cli/test_schema_files.py"
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_every_field_says_what_it_is(what) -> None:
    silent = [
        f"{name}.{field}"
        for name, struct in make_file_schema(what)["$defs"].items()
        for field, about in struct["properties"].items()
        if "description" not in about and "$ref" not in about
    ]
    # These say by their names what they are, and to msgspec nothing more.
    own = {"Source": ("where",), "HeldGroup": ("number", "who", "reason")}
    assert [s for s in silent if s.split(".")[1] not in own.get(s.split(".")[0], ())] == []


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_job_files_are_taken(path: Path) -> None:
    assert judge("job", tomllib.loads(path.read_text())) == []


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_profiles_are_taken(path: Path) -> None:
    assert judge("profile", tomllib.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("what", "document"),
    [
        ("job", {"script": "t.py", "nprc": 2}),
        ("job", {"nproc": 2}),
        ("job", {"script": "t.py", "nproc": "many"}),
        ("job", {"script": "t.py", "checkpoint": {"every_s": -1}}),
        ("job", {"script": "t.py", "name": "a b"}),
        ("profile", {"launch": {"hst": "box"}}),
        ("profile", {"kind": "cloud"}),
    ],
)
def test_what_perdure_refuses_is_refused(what: str, document: dict[str, Any]) -> None:
    assert judge(what, document)


def test_a_word_for_nproc_is_taken() -> None:
    assert judge("job", {"script": "t.py", "nproc": "gpu"}) == []


def test_the_line_for_editors_leads_to_the_shipped_schema(tmp_path: Path) -> None:
    absolute = make_schema_line(tmp_path).removeprefix("#:schema file://")
    assert json.loads(Path(absolute).read_text())["$defs"].keys() >= {JobSpec.__name__}
    above = SCHEMAS.parents[2]
    relative = make_schema_line(above).removeprefix("#:schema ./")
    assert (above / relative).samefile(SCHEMAS / "job.json")
