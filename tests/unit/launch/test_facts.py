"""P8: what a profile says of a platform has a source and a date, or says that it has none."""

import json
import re
from pathlib import Path

import pytest

from perdure.cli.app import run_command
from perdure.launch.catalog import BASELINE, describe_source, flatten, list_profiles, load_profile
from perdure.launch.ssh.check import refuse_proxy
from perdure.model.errors import ConfigError
from perdure.model.platforms.profile import LaunchSection
from perdure.traps.table import TRAPS

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = "/nonexistent"


@pytest.mark.parametrize("name", list_profiles(NOWHERE))
def test_p8_each_fact_says_where_it_was_read_or_that_nobody_knows(name: str) -> None:
    import msgspec

    resolved = load_profile(name, NOWHERE)
    for key in flatten(msgspec.to_builtins(resolved.profile)):
        source = describe_source(resolved, key)
        if resolved.origins.get(key) == BASELINE or key == "overrides.DATA_DIR":
            assert source == ""
        assert not source or source == "source not known" or re.search(r"\(\d{4}-\d{2}", source)
    for one in resolved.profile.sources:
        assert one.profile in list_profiles(NOWHERE)
        assert set(one.facts) <= set(resolved.origins), "a source of what the profile does not say"


def test_p8_a_fact_of_ones_own_and_a_changed_one_take_no_source_of_the_shipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.toml").write_text('base = "aws-spot"\nspot_grace = 60.0\n')
    mine, shipped = load_profile("mine", str(tmp_path)), load_profile("aws-spot", NOWHERE)
    assert "docs.aws.amazon.com" in describe_source(shipped, "spot_grace")
    assert describe_source(mine, "spot_grace") == ""
    assert "docs.aws.amazon.com" in describe_source(mine, "spot_available")
    assert describe_source(shipped, "teardown.keeps_billing") == "source not known"
    assert describe_source(load_profile("kaggle", NOWHERE), "spot_grace") == "source not known"


def test_p8_profiles_show_the_sources(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    assert run_command(["profiles", "runpod"]) == 0
    text = capsys.readouterr().out
    assert "https://docs.runpod.io/faq (2026-11-22)" in text
    assert "source not known" in text
    assert run_command(["profiles", "runpod", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["spot_grace"]["source"] == "https://docs.runpod.io/faq (2026-11-22)"
    assert values["danger"]["source"] == "source not known"


@pytest.mark.parametrize("read", ["yesterday", "2026"])
def test_p8_a_source_without_a_date_is_refused(read: str, tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.toml").write_text(
        f'base = "aws-spot"\n[[sources]]\nfacts = ["danger"]\nwhere = "x"\nread = "{read}"\n'
    )
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load_profile("mine", str(tmp_path))


def test_p8_runpods_proxy_is_refused_by_name_and_behind_an_alias(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host pod\n  HostName ssh.runpod.io\nHost fine\n  HostName 10.0.0.1\n")
    for host in ("abc-123@ssh.runpod.io", "pod"):
        with pytest.raises(ConfigError, match="RunPod's proxy"):
            refuse_proxy(LaunchSection(host=host, ssh_config=str(config)))
    refuse_proxy(LaunchSection(host="fine", ssh_config=str(config)))
    refuse_proxy(LaunchSection())


def test_p8_the_figures_of_the_traps_are_those_of_the_tree() -> None:
    text = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    text = text[text.index("## Traps of platforms") :]
    profile = [trap for trap, _ in TRAPS if re.fullmatch(
        r"GEN[1-8]|SLURM[1-5]|K8S[1-6]|NB[1-5]", trap.id)]  # fmt: skip
    met = sum(bool(trap.how) for trap in profile)
    assert len(profile) == 24
    assert f"| {met} / 0 / 0 |" in text
    found = sum(bool(trap.how) for trap, _ in TRAPS)
    looks = sum("detected" in trap.how for trap, _ in TRAPS)
    assert f"{len(TRAPS)} rows of the table {found} are met somewhere, {looks} by a check" in text
