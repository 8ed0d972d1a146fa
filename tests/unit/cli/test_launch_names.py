"""A job that may still cost money elsewhere is not forgotten for another of its name."""

from pathlib import Path

import msgspec
import pytest

from perdure.cli.platforms.launch import check_name
from perdure.launch.catalog import load_profile
from perdure.launch.records import write_record
from perdure.model.errors import ConfigError
from perdure.model.platforms.launching import LaunchRecord, Plan
from perdure.model.platforms.profile import Profile


def profile(name: str, host: str = "") -> Profile:
    made = load_profile(name, "/nonexistent").profile
    return msgspec.structs.replace(made, launch=msgspec.structs.replace(made.launch, host=host))


@pytest.mark.parametrize(
    ("first", "second", "torn_down_s", "taken"),
    [
        (profile("vastai", "a"), profile("vastai", "a"), 0.0, False),
        (profile("vastai", "a"), profile("vastai", "b"), 0.0, True),
        (profile("vastai", "a"), profile("slurm"), 0.0, True),
        (profile("vastai", "a"), profile("slurm"), 1.0, False),
        (profile("kaggle"), profile("vastai", "a"), 0.0, False),
        (profile("kaggle"), profile("local"), 0.0, True),
    ],
)
def test_a_name_is_taken_until_what_bills_is_torn_down(
    tmp_path: Path, first: Profile, second: Profile, torn_down_s: float, taken: bool
) -> None:
    record = LaunchRecord(
        job="gpt", profile=first, place="/p", home="/h", python="python", torn_down_s=torn_down_s
    )
    write_record(str(tmp_path), record)
    plan = Plan(job="gpt", kind=second.kind, profile=second, files={}, steps=())
    if not taken:
        check_name(plan, str(tmp_path))
        return
    with pytest.raises(ConfigError, match=r"launched on (a|kaggle), and is not torn down"):
        check_name(plan, str(tmp_path))
