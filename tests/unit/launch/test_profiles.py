"""Profiles: diffs over bases, with the origin of each value; mistakes with file and line."""

from pathlib import Path

import msgspec
import pytest

from perdure.cli.platforms.profiles import read_key_meanings, render_danger
from perdure.launch.catalog import flatten, list_profiles, load_profile, overlay
from perdure.launch.lint import check_plan, find_tier
from perdure.launch.platforms import render_job
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.profile import list_unmeasured


def write(home: Path, name: str, text: str) -> None:
    (home / "profiles").mkdir(exist_ok=True)
    (home / "profiles" / f"{name}.toml").write_text(text)


def test_every_shipped_profile_is_whole_and_says_what_it_costs() -> None:
    names = list_profiles("/nonexistent")
    assert {"generic-ssh", "slurm", "kubernetes", "colab", "kaggle", "local"} <= set(names)
    for name in names:
        profile = load_profile(name, "/nonexistent").profile
        assert profile.danger, name
        assert profile.storage.tiers, name
        assert profile.platform == name
        if profile.spot_available:
            assert profile.spot_grace != "n/a", name


def test_every_key_is_documented_where_it_is_defined() -> None:
    keys = set(flatten(msgspec.to_builtins(load_profile("local", "/nonexistent").profile)))
    assert keys - set(read_key_meanings()) == set()


def test_a_diff_says_only_what_differs(tmp_path: Path) -> None:
    write(tmp_path, "mine", 'base = "runpod"\n[launch]\nhost = "gpu-box"\n')
    resolved = load_profile("mine", str(tmp_path))
    profile, origins = resolved.profile, resolved.origins
    assert (profile.platform, profile.launch.host, profile.spot_grace) == ("mine", "gpu-box", 5.0)
    assert origins["launch.host"] == str(tmp_path / "profiles" / "mine.toml")
    assert (origins["spot_grace"], origins["detach_primitive"]) == ("runpod", "generic-ssh")
    assert "launch.connect_timeout_s" not in origins  # A default of perdure's own.


def test_without_a_base_it_is_the_baseline_and_the_same_name_may_be_a_diff(tmp_path: Path) -> None:
    write(tmp_path, "vastai", 'base = "vastai"\n[overrides]\nDATA_DIR = "/data"\n')
    write(tmp_path, "box", "spot_available = false\n")
    assert load_profile("vastai", str(tmp_path)).profile.meter_stop_verb == "destroy"
    assert load_profile("box", str(tmp_path)).origins["kind"] == "generic-ssh"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ('[launch]\npython = "p"\nhst = "x"\n', "line 3: .*unknown field `hst`", "`host`"),
        ('kind = "ssh"\nspot_graze = 3.0\n', "line 2: .*`spot_graze`", "`spot_grace`"),
        ('\n\nshared_fs = "maybe"\n', "line 3: ", "generic-ssh"),
        ("[launch]\nconnect_timeout_s = 0\n", "line 2: .*>= 1", "generic-ssh"),
        ('[overrides]\nDATA_DIR = "$(rm -rf ~)"\n', "line 2: ", "generic-ssh"),
        ("kind = \n", "bad.toml: ", "toml"),
    ],
)
def test_a_mistake_is_told_with_file_and_line(
    tmp_path: Path, text: str, what: str, hint: str
) -> None:
    write(tmp_path, "bad", text)
    with pytest.raises(ConfigError, match=what) as caught:
        load_profile("bad", str(tmp_path))
    assert hint in caught.value.hint
    assert "bad.toml" in caught.value.message


def test_bases_in_a_circle_and_names_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, "a", 'base = "b"\n')
    write(tmp_path, "b", 'base = "a"\n')
    with pytest.raises(ConfigError, match="based on itself"):
        load_profile("a", str(tmp_path))
    with pytest.raises(ConfigError, match="no profile `runpot`") as caught:
        load_profile("runpot", str(tmp_path))
    assert "runpod" in caught.value.hint


def test_measured_values_take_the_place_of_host_dependent_ones() -> None:
    resolved = load_profile("generic-ssh", "/nonexistent")
    assert "inode_cap" in list_unmeasured(resolved.profile)
    measured = overlay(resolved, {"inode_cap": 1000, "launch.host": "h"}, "measured")
    assert "inode_cap" not in list_unmeasured(measured.profile)
    assert measured.origins["inode_cap"] == "measured"
    assert flatten({"launch": {"host": "h"}}) == {"launch.host": "h"}


def test_the_linter_finds_secrets_and_places_that_do_not_last() -> None:
    profile = load_profile("slurm", "/nonexistent").profile
    spec = JobSpec(script="t.py", env={"HF_TOKEN": "abc", "LR": "1"})
    assert [f.text for f in check_plan(spec, profile) if f.level == "error"] == [
        "env.HF_TOKEN looks like a secret, and a job file is no place for one"
    ]
    fleeting = overlay(
        load_profile("slurm", "/nonexistent"), {"overrides.DURABLE_DIR": "$TMPDIR/x"}, "test"
    ).profile
    found = check_plan(JobSpec(script="t.py"), fleeting)
    assert [(f.level, f.trap) for f in found] == [("error", "SLURM5")]


def test_the_tier_of_a_place_is_the_nearest_above_it() -> None:
    profile = load_profile("runpod", "/nonexistent").profile
    found = [find_tier(profile, place) for place in ("/workspace/a", "/root", "$HOME/x")]
    assert [tier.name if tier else "" for tier in found] == ["pod volume", "container disk", ""]


def test_a_rendered_job_reads_back_and_shows_only_what_was_said() -> None:
    spec = JobSpec(name="a", script="t.py", nproc=2, launch=LaunchConfig(outputs=("runs",)))
    text = render_job(spec)
    assert msgspec.json.decode(text, type=JobSpec) == spec
    assert "detect" not in text


def test_what_leaves_the_platform_may_cost() -> None:
    free = load_profile("local", "/nowhere").profile
    assert "EGRESS" not in render_danger(free)
    assert "EGRESS" in render_danger(msgspec.structs.replace(free, free_egress=False))
