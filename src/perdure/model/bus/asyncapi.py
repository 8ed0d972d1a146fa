"""An AsyncAPI 3.0 document of the bus, made of the message types, so that it cannot be old.

`perdure schema` prints it; `docs/asyncapi.json` is checked against it by a test.
"""

from inspect import cleandoc
from typing import Any

import msgspec

from perdure.model.bus.access import ROLES, Role, build_access
from perdure.model.bus.wire import (
    Command,
    CommandReply,
    EventAck,
    EventMessage,
    JoinRequest,
    LinesHeld,
    LinesKnown,
    NodeOrder,
    Notice,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_lines,
    subject_notices,
    subject_orders,
    subject_queries,
)
from perdure.model.events import JournalEntry
from perdure.model.signals.compiled import CompiledAsk, CompiledDoor, subject_compiled
from perdure.model.signals.links import ProbeAsk, ProbeDoor, subject_probe
from perdure.model.signals.progress import NodeBeat

_JOB, _NODE, _ASKER = "{job}", "{node}", "{asker}"
_CHANNELS: tuple[tuple[str, str, type, type | None, str], ...] = (
    ("events", subject_events(_JOB, _NODE), EventMessage, EventAck, "agents to the controller"),
    (
        "beats",
        subject_beats(_JOB, _NODE),
        NodeBeat,
        None,
        "agents to the controller, five a second",
    ),
    ("orders", subject_orders(_JOB, _NODE), NodeOrder, None, "the controller to agents; levels"),
    ("commands", subject_commands(_JOB), Command, CommandReply, "operators to the controller"),
    ("queries", subject_queries(_JOB), Command, CommandReply, "ping and status, for viewers"),
    ("lines", subject_lines(_JOB, _NODE), LinesHeld, LinesKnown, "relays to the lighthouse"),
    ("joins", subject_joins(_JOB), JoinRequest, CommandReply, "a machine asks for a place"),
    ("notices", subject_notices(_JOB), Notice, CommandReply, "an outside monitor's word"),
    ("probe", subject_probe(_JOB, 0)[:-1] + _NODE, ProbeAsk, ProbeDoor, "an agent to another"),
    (
        "compiled",
        subject_compiled(_JOB, _NODE, _ASKER),
        CompiledAsk,
        CompiledDoor,
        "an agent to another",
    ),
    ("journal", subject_journal(_JOB), JournalEntry, None, "JSON Lines; kept in JetStream"),
)


def make_asyncapi(version: str) -> dict[str, Any]:
    """Return the document; `version` is perdure's."""
    said = (t for _, _, sent, answer, _ in _CHANNELS for t in (sent, answer) if t is not None)
    types = list(dict.fromkeys(said))
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        if "description" in schema:  # Before 0.23, msgspec keeps the indentation.
            schema["description"] = cleandoc(schema["description"])
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for name, subject, sent, answer, what in _CHANNELS:
        parameters = {"job": {"description": "The job's name; dots become underscores."}}
        if _NODE in subject:
            parameters["node"] = {
                "description": "A node's number; also lighthouse; all, of orders; run, of events."
            }
        if _ASKER in subject:
            parameters["asker"] = {"description": "The number of the node that asks."}
        channels[name] = {
            "address": subject,
            "description": what,
            "parameters": parameters,
            "messages": {sent.__name__: _point("messages", sent)},
        }
        operation: dict[str, Any] = {
            "action": "send",
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{sent.__name__}"}],
            "x-publish": _list_roles(subject, "publish"),
            "x-subscribe": _list_roles(subject, "subscribe"),
        }
        if answer is not None:
            channels[f"{name}Reply"] = {
                "address": None,
                "description": "The inbox that the request names.",
                "messages": {answer.__name__: _point("messages", answer)},
            }
            operation["reply"] = {
                "address": {"location": "$message.header#/replyTo"},
                "channel": {"$ref": f"#/channels/{name}Reply"},
            }
        operations[name] = operation
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "perdure",
            "version": version,
            "description": "The messages of one job over NATS. Roles and streams: docs/nats.md.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {t.__name__: _describe(t) for t in types},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _point(kind: str, type_: type) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{type_.__name__}"}


def _describe(type_: type) -> dict[str, Any]:
    summary = (type_.__doc__ or "").strip().splitlines()[0]
    return {"name": type_.__name__, "summary": summary, "payload": _point("schemas", type_)}


def _list_roles(subject: str, side: str) -> list[Role]:
    """Return who may publish or subscribe to `subject`, by the same table as the server's."""
    wanted = subject.replace(_NODE, "*").replace(_JOB, "J")
    patterns = {role: getattr(build_access(role, "J"), side) for role in ROLES}
    return [role for role in ROLES if any(_fits(wanted, each) for each in patterns[role])]


def _fits(subject: str, pattern: str) -> bool:
    ours, theirs = subject.split("."), pattern.split(".")
    return len(ours) == len(theirs) and all(
        a == b or "*" in (a, b) for a, b in zip(ours, theirs, strict=True)
    )
