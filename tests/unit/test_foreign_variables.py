"""Tests see nothing of the job, the terminal, or the proxy that they were started beside."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.environment import choose_plain_tmp, drop_foreign, skip_shim


def test_what_another_job_or_a_proxy_sets_is_dropped() -> None:
    foreign = {"RANK": "3", "SLURM_JOB_ID": "7", "PERDURE_JOB": "k1", "https_proxy": "http://p:1"}
    own = {"PATH": "/bin", "HOME": "/h", "PERDURE_EXPLORE": "1", "TZ": "UTC", "SSL_CERT_FILE": "c"}
    environ = foreign | own
    drop_foreign(environ)
    assert environ == own


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("/tmp/a b", "/tmp"), ("/tmp/ü", "/tmp"), ("/var/tmp/a-b_1.c", "/var/tmp/a-b_1.c")],
)
def test_a_tmpdir_that_a_shell_splits_is_left(given: str, chosen: str) -> None:
    environ = {"TMPDIR": given}
    choose_plain_tmp(environ)
    assert environ == {"TMPDIR": chosen}


def test_a_script_in_the_place_of_python3_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin"}
    skip_shim(environ)
    assert environ == {"PATH": f"{sys.base_prefix}/bin:{tmp_path}:/bin"}
    skip_shim(environ)
    assert shutil.which("python3", path=environ["PATH"]) == f"{sys.base_prefix}/bin/python3"
    assert environ == {"PATH": f"{sys.base_prefix}/bin:{tmp_path}:/bin"}
