"""Accounting for the tests' cluster: a private MariaDB and slurmdbd, as ordinary processes."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

NEEDED = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageLoc=slurm_acct
StorageUser=slurm
StorageHost=localhost
CommitDelay=0
"""
_LINES = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={root}/munge.sock
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherFrequency=2
"""
"""Of slurm.conf. The connection to slurmdbd ignores AuthInfo: the socket is the pass."""
_SQL = (
    "create database if not exists slurm_acct; create user if not exists 'slurm'@'localhost'; "
    "grant all on slurm_acct.* to 'slurm'@'localhost'"
)

Spawn = Callable[..., None]
Wait = Callable[..., None]


def find_lines(root: Path, port: int) -> str:
    """Return what slurm.conf says of the accounting."""
    return _LINES.format(root=root, port=port)


def start_accounting(root: Path, port: int, spawn: Spawn, wait: Wait) -> None:
    """Start MariaDB and slurmdbd, which slurmctld wants up before itself."""
    data, sock = root / "db", root / "my.sock"
    subprocess.run(
        ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
         "--auth-root-authentication-method=normal", "--skip-test-db"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    spawn(
        "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}",
        f"--socket={sock}", "--skip-networking", f"--pid-file={root}/mariadb.pid",
        "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
        "--skip-innodb-doublewrite",
    )  # fmt: skip

    def ask(sql: str) -> bool:
        command = ["mariadb", "--no-defaults", "-uroot", "-S", str(sock), "-e", sql]
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0

    wait(lambda: ask("select 1"), "answer of MariaDB")
    assert ask(_SQL)
    conf = root / "slurmdbd.conf"
    conf.write_text(_CONF.format(root=root, port=port))
    conf.chmod(0o600)
    spawn("slurmdbd", "env", f"MYSQL_UNIX_PORT={sock}", "slurmdbd", "-D")
    wait(lambda: is_listening(port), "slurmdbd")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
