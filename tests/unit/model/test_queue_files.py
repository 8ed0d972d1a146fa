"""Queue files: entries, defaults and grids to items."""

from typing import Any

import msgspec
import pytest

from perdure.model.errors import ConfigError
from perdure.model.queue import QueueFile, expand_file, replace_fields


def expand(*items: dict[str, Any], **defaults: Any) -> tuple[Any, ...]:
    document = {"item": list(items), "defaults": defaults}
    return expand_file(msgspec.convert(document, QueueFile))


def test_a_grid_makes_an_item_of_every_combination() -> None:
    found = expand(
        {
            "name": "t-{lr}",
            "command": ["train", "--lr={lr}", "{seed}", "{name}", "{{lr}}"],
            "grid": {"lr": [0.1, 1e-5], "seed": [0, 1]},
            "done": ["out/{name}.pt"],
        }
    )
    assert [p.item.name for p in found] == ["t-0.1-0", "t-0.1-1", "t-1e-05-0", "t-1e-05-1"]
    assert found[1].item.command == ("train", "--lr=0.1", "1", "t-0.1-1", "{lr}")
    assert found[3].item.done == ("out/t-1e-05-1.pt",)


def test_an_entry_wins_over_the_defaults() -> None:
    (a, b) = expand(
        {"name": "a", "command": ["x"], "retries": 0, "env": {"K": "2"}},
        {"name": "b", "command": ["x"]},
        retries=7,
        env={"K": "1", "L": "1"},
    )
    assert (a.item.retries, a.item.env) == (0, {"K": "2", "L": "1"})
    assert (b.item.retries, b.item.env, b.item.gpus) == (7, {"K": "1", "L": "1"}, 1)


def test_a_job_elsewhere_takes_no_slot_here_unless_it_says_so() -> None:
    (away, wide, here) = expand(
        {"name": "away", "job": "j.toml"},
        {"name": "wide", "job": "j.toml", "on": "box", "gpus": 2},
        {"name": "here", "command": ["x"]},
        on="cluster",
    )
    assert [(p.item.on, p.item.gpus) for p in (away, wide, here)] == [
        ("cluster", 0), ("box", 2), ("", 1),
    ]  # fmt: skip


def test_after_an_entry_means_after_all_its_items() -> None:
    found = expand(
        {"name": "t", "command": ["x"], "grid": {"s": [0, 1]}},
        {"name": "end", "command": ["x"], "after": ["t"]},
    )
    assert found[-1].item.after == ("t-0", "t-1")


def test_values_of_a_grid_keep_their_type_in_a_job() -> None:
    (found,) = expand(
        {"name": "t", "job": "j.toml", "grid": {"n": [4]}, "set": {"nproc": "{n}", "args": ["{n}"]}}
    )
    assert found.set == {"nproc": 4, "args": [4]}
    assert replace_fields({"restart": {"grace_s": 1}}, {"restart.max_restarts": 2}) == {
        "restart": {"grace_s": 1, "max_restarts": 2}
    }


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "a", "command": ["{lrr}"], "grid": {"lr": [1]}}, "no `lrr` in its grid"),
        ({"name": "a"}, "either `command` or `job`"),
        ({"name": "a", "command": ["x"], "job": "j"}, "either `command` or `job`"),
        ({"name": "a", "command": ["x"], "grid": {"lr": []}}, "0 points"),
        ({"name": "a", "command": ["x"], "grid": {"n": list(range(101)), "m": list(range(100))}},
         "10100 points"),
        ({"name": "../a", "command": ["x"]}, "is no name"),
        ({"name": "a{p}", "command": ["x"], "grid": {"p": ["x/y"]}}, "is no name"),
        ({"name": "a", "command": ["x"], "grid": {"s": [1, 1]}}, "two of this name"),
        ({"name": "a", "command": ["x"], "set": {"nproc": 1}}, "`set` changes fields of a job"),
        ({"name": "a", "command": ["x"], "on": "box"}, "`on` is for a job"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expand(entry)
