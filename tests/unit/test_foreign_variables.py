"""Tests see nothing of the job, the terminal, or the proxy that they were started beside."""

from tests.environment import drop_foreign


def test_what_another_job_or_a_proxy_sets_is_dropped() -> None:
    foreign = {"RANK": "3", "SLURM_JOB_ID": "7", "PERDURE_JOB": "k1", "https_proxy": "http://p:1"}
    own = {"PATH": "/bin", "HOME": "/h", "PERDURE_EXPLORE": "1", "TZ": "UTC", "SSL_CERT_FILE": "c"}
    environ = foreign | own
    drop_foreign(environ)
    assert environ == own
