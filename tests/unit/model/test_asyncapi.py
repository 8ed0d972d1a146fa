"""The bus's document is what the code says, and holds together.

After a change of messages: `UPDATE_GOLDEN=1 pytest tests/unit/model/test_asyncapi.py`.
"""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
import perdure.model.bus.wire as wire
from perdure.cli.app import run_command
from perdure.model.bus.access import ROLES, build_access
from perdure.model.bus.asyncapi import make_asyncapi

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "asyncapi.json"


def find_refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            else:
                yield from find_refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_refs(each)


def test_the_document_is_that_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["schema"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == json.loads(json.dumps(make_asyncapi(perdure.__version__)))
    if os.environ.get("UPDATE_GOLDEN"):
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text, "UPDATE_GOLDEN=1 pytest tests/unit/model/test_asyncapi.py"


def test_every_reference_leads_somewhere() -> None:
    document = make_asyncapi("1")
    for ref in set(find_refs(document)):
        place: Any = document
        for part in ref.removeprefix("#/").split("/"):
            assert part in place, ref
            place = place[part]


def test_every_subject_has_a_channel_and_somebody_at_each_end() -> None:
    document = make_asyncapi("1")
    addresses = {channel["address"] for channel in document["channels"].values()}
    for name, function in inspect.getmembers(wire, inspect.isfunction):
        if name.startswith("subject_"):
            more = ["{node}"] if "node" in inspect.signature(function).parameters else []
            assert function("{job}", *more) in addresses, name
    for name, operation in document["operations"].items():
        assert operation["x-publish"], name
        assert operation["x-subscribe"], name


def test_every_subject_and_role_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "nats.md").read_text()
    for channel in make_asyncapi("1")["channels"].values():
        if channel["address"] is not None:
            subject = channel["address"]
            for name in ("JOB", "NODE", "ASKER"):
                subject = subject.replace(f"{{{name.lower()}}}", name)
            assert f"| `{subject}`" in text, subject
    assert [role for role in ROLES if f"| {role} |" not in text] == []


def test_only_operators_command_and_nobody_may_do_everything() -> None:
    commands = wire.subject_commands("a")
    assert [r for r in ROLES if commands in build_access(r, "a").publish] == ["run", "operator"]
    for role in ROLES:
        access = build_access(role, "a.b", 3 if role == "agent" else None)
        for subject in (*access.publish, *access.subscribe):
            assert subject not in (">", "*", "$JS.API.>", "perdure.>")
            assert "a.b" not in subject
            own = subject.startswith(("perdure.a_b.", "_INBOX.")) or any(
                name in subject for name in ("PERDURE_a_b_JOURNAL", "PERDURE_a_b_LEASE")
            )
            assert own, (role, subject)
