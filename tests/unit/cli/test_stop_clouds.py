"""P7 with the clouds' own command lines, which are played: they take what they are documented to.

A flag that they do not have, an id that they do not know, a zone or a group that is not set, and a
machine that is only on its way are answered in the words of the real ones.
"""

from pathlib import Path

import msgspec
import pytest
from tests.gate_site import Site, make_site, write_tensors
from tests.played_cloud import CLOUDS, Cloud

from perdure.launch.catalog import load_profile
from perdure.launch.results import gone


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    return make_site(tmp_path, monkeypatch, capsys)


@pytest.fixture(params=list(CLOUDS))
def cloud(request: pytest.FixtureRequest, site: Site, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setattr(gone, "PAUSE_S", 0.02)
    teardown = load_profile(request.param, "/nonexistent").profile.teardown
    site.set_profile(teardown=msgspec.structs.replace(teardown, id="box-1", gone_wait_s=20.0))
    write_tensors(site.job / "project" / "best.safetensors")
    site.pull()
    site.verify()
    played = Cloud(site.folder, request.param)
    monkeypatch.setenv("PLAYED_CLOUD", str(played.state))
    return played


def set_id(site: Site, id_: str, wait_s: float = 20.0) -> None:
    teardown = msgspec.structs.replace(site.record.profile.teardown, id=id_, gone_wait_s=wait_s)
    site.set_profile(teardown=teardown)


def test_torn_down_is_said_once_the_cloud_says_that_it_is_gone(site: Site, cloud: Cloud) -> None:
    """Through an answer that it is on its way, and one that is an error."""
    said = site.teardown()
    assert "gpt: torn down" in said
    assert "is not gone yet" in said
    assert cloud.ask("stopped")
    assert cloud.ask("lag") == 0
    assert site.read_record().torn_down_s > 0


def test_a_machine_that_is_only_on_its_way_is_not_torn_down(site: Site, cloud: Cloud) -> None:
    cloud.know(lag=10_000)
    set_id(site, "box-1", wait_s=0.2)
    assert "stop was asked for" in site.teardown(code=3)
    assert site.read_record().torn_down_s == 0
    cloud.know(lag=1)
    set_id(site, "box-1")
    assert "gpt: torn down" in site.teardown()


@pytest.mark.parametrize("cloud", ["aws-spot", "azure-spot"], indirect=True)
def test_a_machine_that_is_not_found_may_be_elsewhere(site: Site, cloud: Cloud) -> None:
    """In another region, account or group it still bills: only what shows it as ended says so."""
    cloud.know(stopped=True, lag=-100)
    set_id(site, "box-1", wait_s=0.2)
    assert "does not say that" in site.teardown(code=3)
    assert site.read_record().torn_down_s == 0


def test_an_id_that_the_cloud_does_not_know_stops_nothing(site: Site, cloud: Cloud) -> None:
    set_id(site, "box-2", wait_s=0.2)
    assert site.teardown(code=4 if cloud.profile == "gcp-spot" else 3)
    assert not cloud.ask("stopped")
    assert site.read_record().torn_down_s == 0


def test_a_command_line_that_is_not_set_up_stops_nothing_and_ends_no_job(
    site: Site, cloud: Cloud
) -> None:
    cloud.know(set_up=False)
    said = site.teardown(code=3)
    assert "THE METER MAY STILL RUN" in said
    assert not cloud.ask("stopped")
    assert site.read_record().torn_down_s == 0
