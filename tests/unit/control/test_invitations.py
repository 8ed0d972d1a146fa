"""D3: an invitation expires, serves the machine that used it first, and can be revoked."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.journals import reseal
from tests.unit.control.driver import Driver, one

from perdure.control.joining import preview_invitations
from perdure.model.codec import encode
from perdure.model.events import CommandReceived, JournalEntry, NodeLost
from perdure.model.orders import AnswerCommand, RecordEvent
from perdure.service.access.joining import read_invitations

DIGEST = sha256(b"secret").hexdigest()


class Places:
    """A job of two nodes, of which one comes from elsewhere."""

    def __init__(self) -> None:
        self.driver = Driver(nodes=2, remote=1)
        self.count = 0
        self.lines: list[bytes] = []

    def ask(self, kind: str, **args: Any) -> AnswerCommand:
        self.count += 1
        event = CommandReceived(
            id=f"c{self.count}",
            kind=kind,
            args=args,
            who="ann",
            at_s=self.driver.now,  # type: ignore[arg-type]
        )
        actions = self.driver.do(event)
        for action in actions:  # As the controller's loop does: what is recorded is an event.
            if isinstance(action, RecordEvent):
                self.driver.do(action.event)
                self.lines.append(encode(JournalEntry(self.count, self.driver.now, action.event)))
        told: AnswerCommand = one(actions, AnswerCommand)
        return told

    def invite(self, id_: str = "i1", **args: Any) -> AnswerCommand:
        return self.ask("invite", id=id_, digest=DIGEST, **args)

    def join(self, machine: str, id_: str = "i1", proof: str = DIGEST) -> AnswerCommand:
        return self.ask(
            "join", machine=machine, host=f"host-{machine}", invitation=id_, proof=proof
        )

    def states(self) -> dict[str, str]:
        found = preview_invitations(
            self.driver.controller.state, self.driver.now, "invite", {"list": True}
        )
        assert found is not None
        return {row["id"]: row["state"] for row in found[2]["invitations"]}

    def lose(self) -> None:
        self.driver.do(NodeLost(node=1, at_s=self.driver.now, reason="silent"))
        self.driver.now += 40.0


def test_it_serves_one_machine_which_may_come_back_and_nobody_else() -> None:
    places = Places()
    places.invite(expires_s=60.0)
    assert places.states() == {"i1": "open"}
    assert places.join("x").result == {"node": 1}
    assert places.states() == {"i1": "spent"}
    places.lose()
    other = places.join("y")
    assert (other.ok, other.result) == (False, {"final": True})
    assert other.reason == "invitation i1 is spent: it has served host-x"
    places.driver.now += 3600.0
    assert places.join("x").result == {"node": 1}, "its own, and expired meanwhile"


def test_it_expires_before_its_first_use() -> None:
    places = Places()
    places.invite(expires_s=60.0)
    places.driver.now += 61.0
    told = places.join("x")
    assert told.result == {"final": True}
    assert told.reason == "invitation i1 has expired: it was good for 60 s"


def test_without_its_secret_it_is_none() -> None:
    places = Places()
    places.invite()
    for id_, proof in (("i1", ""), ("i1", sha256(b"guess").hexdigest()), ("i2", DIGEST), ("", "")):
        assert "not one of this job" in places.join("x", id_, proof).reason
    assert places.states() == {"i1": "open"}


def test_a_revoked_one_brings_back_nobody() -> None:
    places = Places()
    places.invite()
    assert places.join("x").ok
    places.driver.register(0)
    places.driver.register(1)
    assert places.ask("revoke", id="i1").result == {"id": "i1", "nodes": [1], "served": [1]}
    assert places.join("x").reason == "invitation i1 was revoked"
    assert not places.ask("revoke", id="i9").ok


def test_a_revoked_one_names_every_node_whose_login_it_gave_away() -> None:
    """D3: who had held a place before its present holder kept the login of it."""
    places = Places()
    for id_ in ("i1", "i2", "i3"):
        places.invite(id_)
    assert places.join("x", "i1").ok
    places.lose()
    assert places.join("y", "i2").result == {"node": 1}
    for id_, served in (("i1", [1]), ("i2", [1]), ("i3", [])):
        told = places.ask("revoke", id=id_).result
        assert told == {"id": id_, "nodes": [], "served": served}, "y is not there yet"


def test_anothers_place_is_not_taken_by_its_name() -> None:
    """Who knows a machine's name, and has an invitation of his own, does not get its login."""
    places = Places()
    places.invite("i1")
    places.invite("i2")
    assert places.join("x", "i1").ok
    places.driver.register(0)
    places.driver.register(1)
    assert "node 1 already" in places.join("x", "i2").reason
    places.lose()
    assert places.join("x", "i2").ok, "it is gone, and comes back by another"


def test_one_for_all_pods_serves_all() -> None:
    places = Places()
    places.invite(uses=0)
    assert places.join("x").ok
    places.driver.register(0)
    places.driver.register(1)
    assert "no place is free" in places.join("y").reason
    assert places.states() == {"i1": "open"}


def test_malformed_ones_are_refused() -> None:
    places = Places()
    for args in ({}, {"id": "a" * 99, "digest": DIGEST}, {"id": "a", "digest": "b"},
                 {"id": "a", "digest": DIGEST, "uses": -1},
                 {"id": "a", "digest": DIGEST, "expires_s": "soon"},
                 {"id": "a", "digest": DIGEST, "machines": 7}):  # fmt: skip
        assert not places.ask("invite", **args).ok, args
    assert places.states() == {}


def test_the_next_run_knows_what_became_of_them(tmp_path: Path) -> None:
    places = Places()
    places.invite("i1")
    places.invite("i2", uses=0)
    places.invite("i3")
    places.join("x", "i1")
    places.ask("revoke", id="i3")
    (whole,) = reseal([b"\n".join(places.lines)])
    (tmp_path / "journal.jsonl").write_bytes(whole + places.lines[0][:40])
    kept = read_invitations(str(tmp_path))
    assert [each["id"] for each in kept] == ["i1", "i2"]
    after = Places()
    for each in kept:
        assert after.ask("invite", **each).ok
    assert "spent" in after.join("y", "i1").reason
    assert after.join("x", "i1").ok
    assert read_invitations(str(tmp_path / "nowhere")) == []
