"""Members compare what they have alike, and name the first tensor that differs."""

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from tests.waiting import PATIENCE_S
from torch import nn

from perdure.model.errors import DifferError, PlatformError
from perdure.worker.checkpoint.attributes import pack
from perdure.worker.elastic import comparing
from perdure.worker.elastic.comparing import NAMED, Comparison, find_odd, hash_attributes
from perdure.worker.elastic.group import Broken, read_keys
from perdure.worker.elastic.state.replicated import Replica

pytestmark = pytest.mark.torch


class Store:
    """A store that all members of a test share."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.kept[key] for key in keys]


class Place:
    """One member's group."""

    def __init__(self, store: Store, me: int, size: int) -> None:
        self.store, self.me, self.members = store, me, tuple(range(size))
        self.called = False

    def overtaken(self) -> bool:
        return self.called

    def read(self, keys: list[str]) -> list[bytes]:
        return read_keys(self.store, keys, self.overtaken)


def compare_all(units: list[dict[str, Any]], step: int = 0) -> list[str]:
    """Return what each member says of the others' states; an empty text if they agree."""
    return ["" if error is None else str(error) for error in find_errors(units, step)]


def find_errors(units: list[dict[str, Any]], step: int = 0) -> list[PlatformError | None]:
    """Return the error of each member; None if they agree."""
    store = Store()
    said: list[PlatformError | None] = [None] * len(units)

    def run(me: int) -> None:
        comparison, group = Comparison(lambda: units[me]), Place(store, me, len(units))
        try:
            comparison.enter(group.members, met=False)
            comparison.begin(step, group)  # type: ignore[arg-type]
            comparison.finish(step, group)  # type: ignore[arg-type]
        except PlatformError as error:
            said[me] = error

    threads = [threading.Thread(target=run, args=(me,), name=str(me)) for me in range(len(units))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return said


def make_units(number: int, **changed: Any) -> dict[str, Any]:
    model = {"a": torch.arange(3.0), "b": torch.ones(2)}
    settings = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    return {"": {"model": model | changed, "settings": settings}}


def test_members_with_the_same_bytes_agree() -> None:
    assert compare_all([make_units(n) for n in range(3)]) == ["", "", ""]


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 1.0 + 2**-23]),
        torch.ones(2, dtype=torch.float64),
        torch.ones(1, 2),
        torch.tensor([1.0, float("nan")]),
    ],
    ids=["last bit", "type", "shape", "nan"],
)
def test_all_members_name_the_tensor_and_the_one_that_differs(other: torch.Tensor) -> None:
    said = compare_all([make_units(0), make_units(1), make_units(2, b=other)])
    assert len(set(said)) == 1
    assert "model.b of rank 2 is not that of rank 0" in said[0]


def test_of_two_members_none_is_said_to_be_wrong() -> None:
    units = [make_units(0), make_units(1, b=torch.zeros(2))]
    assert (
        compare_all(units)
        == ["elastic: members differ before step 0: rank 0 and rank 1 do not have the same model.b"]
        * 2
    )
    for most, wrong in ((2, 1), (2, 2)):
        groups = [make_units(n) for n in range(most)]
        groups += [make_units(n, b=torch.zeros(2)) for n in range(wrong)]
        kinds = [type(error) for error in find_errors(groups)]
        assert (
            kinds == [DifferError] * most + [PlatformError if most > wrong else DifferError] * wrong
        )


def test_a_rate_that_differs_is_named() -> None:
    other = make_units(1)
    other[""]["settings"]["groups"][0]["lr"] = 0.2
    assert "the same settings.groups.0.lr" in compare_all([make_units(0), other])[0]


def test_members_that_hold_different_parts_compare_what_they_both_have() -> None:
    ones = [{"block 0": {"w": torch.ones(1)}}, {"block 1": {"w": torch.zeros(1)}}]
    assert compare_all([*ones, *ones]) == [""] * 4
    ones = [*ones, {"block 1": {"w": torch.ones(1)}}]
    assert "rank 1 and rank 2 do not have the same w" in compare_all(ones)[0]


def test_members_of_other_processors_may_round_differently_and_train_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error would end a healthy job on mixed machines again and again."""
    kinds = {"0": "AVX2", "1": "AVX2", "2": "AVX512"}
    monkeypatch.setattr(
        comparing, "describe_processor", lambda: kinds[threading.current_thread().name]
    )
    other = torch.tensor([1.0, 1.0 + 2**-23])
    assert compare_all([make_units(0), make_units(1), make_units(2, b=other)]) == ["", "", ""]
    assert "rank 2 (AVX512) and rank 0 (AVX2) round differently" in capfd.readouterr().err
    said = compare_all([make_units(0), make_units(1, b=other), make_units(2, b=other)])
    assert all("rank 0 and rank 1 do not have the same model.b" in one for one in said)


def test_attributes_that_differ_are_named_and_training_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An evaluation on one rank may have left them there."""
    for other in (np.ones(2), torch.ones(2), 7):
        units = [
            {"": {}, f"{NAMED} of block 0": hash_attributes({"model.0": {"table": pack(value)}})}
            for value in (np.zeros(2), np.zeros(2), other)
        ]
        assert compare_all(units) == [""] * 3
        said = capfd.readouterr().err
        assert said.count("do not have model.0.table in common (of rank 2, and of rank 0)") == 1
    units = [{f"{NAMED} of block 0": {}} for _ in range(3)]
    units[2][f"{NAMED} of block 0"] = hash_attributes({"model.0": {"mask": pack(torch.ones(1))}})
    assert compare_all(units) == [""] * 3
    assert "in common" not in capfd.readouterr().err, "only one of them has it"


def test_an_object_with_an_address_is_no_difference() -> None:
    assert compare_all([make_units(n, b=object()) for n in range(2)]) == ["", ""]


def test_the_member_that_differs_is_the_one_that_most_differ_from() -> None:
    assert find_odd({3: "x", 5: "y", 6: "y"}) == (3, 5)
    assert find_odd({3: "x", 5: "y"}) == (5, 3)


def test_a_world_compares_at_its_first_two_steps_and_then_every_hundredth() -> None:
    store, steps = Store(), list[int]()
    comparison = Comparison(lambda: steps.append(step) or {})  # type: ignore[func-returns-value]
    for world, first in enumerate((7, 150)):
        group: Any = Place(store, 0, 2)
        comparison.enter((0, 1), met=False)
        for step in range(first, first + 120):
            store.kept[f"state/{step}/1"] = b"{}"
            comparison.begin(step, group)
            comparison.finish(step, group)
        comparison.finish(step, group, wanted=True)
        mine = [[7, 8, 100, 126], [150, 151, 200, 269]]
        assert steps == [step for one in mine[: world + 1] for step in one]
    assert comparing.EVERY == 100


def test_members_that_have_met_compare_in_the_second_step_only() -> None:
    """After a loss, all members wait for the first step."""
    store, steps = Store(), list[int]()
    comparison = Comparison(lambda: steps.append(step) or {})  # type: ignore[func-returns-value]
    worlds = {7: (0, 1, 2), 12: (0, 1), 17: (0, 1), 22: (0, 1, 2), 27: (0, 1, 2)}
    due = {7: [7, 8], 12: [13], 17: [18], 22: [22, 23], 27: [28]}
    for first, members in worlds.items():
        group: Any = Place(store, 0, len(members))
        comparison.enter(members, met=comparison.has_met(members))
        for step in range(first, first + 4):
            store.kept |= {f"state/{step}/{other}": b"{}" for other in members[1:]}
            comparison.begin(step, group)
            comparison.finish(step, group)
        assert [step for step in steps if step >= first] == due[first], members


def test_hashes_of_a_world_that_broke_are_not_compared_in_the_next_one() -> None:
    """Members may go back, and stop at that step: they compare it, and no step begins before."""
    state, store, group = {"step": 5}, Store(), Place(Store(), 0, 2)
    one, other = (Comparison(lambda: {"": dict(state)}) for _ in range(2))
    one.enter(group.members, met=False)
    one.begin(5, group)  # type: ignore[arg-type]
    state["step"] = 3
    for comparison in (one, other):
        comparison.enter(group.members, met=False)
    places: list[Any] = [Place(store, me, 2) for me in (0, 1)]
    beside = threading.Thread(target=other.finish, args=(3, places[1]), kwargs={"wanted": True})
    beside.start()
    one.finish(3, places[0], wanted=True)
    beside.join(PATIENCE_S)
    assert not beside.is_alive()


def test_a_member_that_is_called_into_a_newer_world_does_not_wait() -> None:
    comparison, group = Comparison(lambda: {}), Place(Store(), 0, 2)
    comparison.enter(group.members, met=False)
    comparison.begin(0, group)  # type: ignore[arg-type]
    group.called = True
    with pytest.raises(Broken):
        comparison.finish(0, group)  # type: ignore[arg-type]


def test_a_newcomer_has_all_that_members_compare() -> None:
    """The whole state comes over: flags, groups, types, places in memory, and buffers."""

    class Rows(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    entry = self.state[p]
                    entry["list"] = [torch.full((3,), 2.0**-20 + 1), torch.tensor(7)]
                    entry["double"] = torch.full_like(p, 1 / 3, dtype=torch.float64)

    def make() -> Replica:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(2, 2), nn.Dropout())
        nn.Module.to(model[0], memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.bfloat16().register_buffer("mask", None)
        return Replica(model, Rows(model[0].parameters()))

    member, newcomer = make(), make()
    with torch.no_grad():
        for p in member.parameters:
            p.add_(1.0)
    member.model[1].requires_grad_(False)
    member.model[2].eval()
    member.model.mask = torch.arange(3)
    member.optimizer.add_param_group({"params": list(member.model[1].parameters()), "lr": 0.5})
    member.optimizer.step()
    newcomer.load(member.state())
    assert compare_all([{"": one.list_compared()} for one in (member, newcomer)]) == ["", ""]
    weight = newcomer.model[0].weight
    assert newcomer.optimizer.state[weight]["double"].stride() == weight.stride()
    for one in member.optimizer.state[member.model[0].weight]["list"]:
        one.zero_()
    assert newcomer.optimizer.state[weight]["list"][1] == 7, "nothing is shared"
