"""`perdure run --nnodes N`: where the nodes meet, which is the first, and what does not go with it.

Slurm's variables are those of `srun --nodes=3 --ntasks-per-node=1`, Open MPI's those of `mpirun
--map-by ppr:1:node`, as their manuals name them.
"""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.running import nodes
from perdure.cli.running.jobspec import make_spec
from perdure.cli.running.nodes import Muster, find_place, name_job
from perdure.cli.running.options import RunOptions
from perdure.cli.running.torchrun import Rendezvous, name_first_host, read_rendezvous
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.model.report import DeviceRow, Snapshot

SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
HOST0 = {"--rdzv-endpoint": "host0:29400"}


def read(environ: dict[str, str] | None = None, **given: str) -> Rendezvous | None:
    options: dict[str, str | bool | None] = {
        f"--{name.replace('_', '-')}": value for name, value in given.items()
    }
    return read_rendezvous(options, environ or {})


def test_torchruns_options() -> None:
    met = read(nnodes="3", rdzv_endpoint="host0:29400", rdzv_id="job-7")
    assert met == Rendezvous(nodes_min=3, nodes_max=3, host="host0", port=29400, id="job-7")
    met = read(nnodes="3", node_rank="2", master_addr="10.0.0.1", master_port="29511")
    assert met is not None
    assert (met.host, met.port, met.rank, met.id) == ("10.0.0.1", 29511, 2, "")
    met = read(
        nnodes="1:4", rdzv_endpoint="host0", rdzv_id="none", local_addr="10.0.0.4",
        rdzv_conf="join_timeout=30, secret_file=/s, read_timeout=9",
    )  # fmt: skip
    assert met is not None
    assert (met.nodes_min, met.nodes_max, met.port, met.id) == (1, 4, 29500, "")
    assert (met.join_s, met.secret_file, met.address) == (30.0, "/s", "10.0.0.4")


def test_one_node_is_this_machine_alone_whatever_a_scheduler_says() -> None:
    """Someone who starts many jobs by one srun wants many jobs."""
    for environ in ({}, SRUN, MPIRUN):
        assert read(environ) is None
        assert read(environ, nnodes="1", rdzv_endpoint="localhost:0") is None


def test_slurm_says_how_many_and_which_is_the_first() -> None:
    for text in ("3", "auto"):
        met = read(SRUN, nnodes=text)
        assert met == Rendezvous(nodes_min=3, nodes_max=3, host="gpu007", rank=2)
    assert read(SRUN, nnodes="auto", **{"node-rank": "0"}).rank == 0  # type: ignore[union-attr]
    met = read(SRUN, nnodes="auto", rdzv_endpoint="host0:1")
    assert met is not None
    assert (met.host, met.rank) == ("host0", None), "the address says who is the first"
    alone = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    batch = {"SLURM_NNODES": "3", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    for environ in (alone, batch):
        with pytest.raises(ConfigError, match="where do the nodes meet"):
            read(environ, nnodes="3")
        with pytest.raises(ConfigError, match="neither srun nor mpirun"):
            read(environ, nnodes="auto")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-03,7],m2", "n01"),
        ("r[2-3]n[08-09]", "r2n08"),
        ("gpu[3,5].site,x", "gpu3.site"),
        ("", ""),
    ],
)
def test_slurms_lists_of_hosts(hosts: str, first: str) -> None:
    assert name_first_host(hosts) == first


def test_open_mpi_says_how_many_and_which_this_one_is() -> None:
    met = read(MPIRUN, nnodes="auto", master_addr="host0")
    assert met == Rendezvous(nodes_min=3, nodes_max=3, host="host0", rank=1)
    with pytest.raises(ConfigError, match="where do the nodes meet"):
        read(MPIRUN, nnodes="auto")


def test_several_tasks_on_a_node_are_refused_with_the_option_that_starts_one() -> None:
    with pytest.raises(ConfigError, match="24 tasks on 3 nodes") as caught:
        read(SRUN | {"SLURM_STEP_NUM_TASKS": "24"}, nnodes="3")
    assert "--ntasks-per-node=1" in caught.value.hint
    with pytest.raises(ConfigError, match="mpirun starts 3 tasks") as caught:
        read(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, nnodes="3")
    assert "ppr:1:node" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "where do the nodes meet"),
        ({"rdzv_endpoint": "host0:x"}, "not a port"),
        ({"rdzv_endpoint": "host0:70000"}, "not a port"),
        ({"rdzv_endpoint": "[fd00::1]:29500"}, "neither HOST nor HOST:PORT"),
        ({"rdzv_endpoint": ":29500"}, "neither HOST nor HOST:PORT"),
        ({"master_addr": "h", "master_port": "-1"}, "not a port"),
        ({"node_rank": "3", **HOST0}, "where|not a node of 3"),
        ({"node_rank": "first", **HOST0}, "not a node of 3"),
        ({"rdzv_endpoint": "h", "rdzv_conf": "join_timeout=soon"}, "not a time"),
        ({"rdzv_endpoint": "h", "rdzv_conf": "join_timeout=nan"}, "not a time"),
        ({"rdzv_endpoint": "h", "rdzv_conf": "join_timeout"}, "not KEY=VALUE"),
        ({"rdzv_endpoint": "h", "standalone": "yes"}, "exclude one another"),
    ],
)
def test_nonsense(given: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(nnodes="3", **given)


def test_the_job_has_a_place_for_each_other_node(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    given: dict[str, Any] = {"script": script, "nproc": "8", "rdzv_endpoint": "host0:29500"}
    spec, named, notes = make_spec(RunOptions(nnodes="3", rdzv_id="big", **given))
    assert (spec.nodes, spec.remote, spec.local_nodes, spec.world_size) == (3, 2, 1, 24)
    assert (named, spec.env, notes) == (False, {"TORCHELASTIC_RUN_ID": "big"}, [])
    spec, _, _ = make_spec(RunOptions(nnodes="2:5", spares=8, **given))
    assert (spec.nodes, spec.nodes_max, spec.remote, spec.local_nodes) == (2, 5, 5, 1)


def test_what_does_not_go_with_it_is_refused(tmp_path: Path) -> None:
    for more in (
        {"nodes": 3},
        {"remote": 1},
        {"placement": "p.json"},
        {"detach": True},
        {"torchft": True},
        {"nats": "nats://127.0.0.1:4222"},
    ):
        with pytest.raises(ConfigError):
            make_spec(RunOptions(script="x.py", nnodes="3", rdzv_endpoint="h", **more))  # type: ignore[arg-type]


def test_every_node_finds_the_same_name() -> None:
    def name(script: str, id_: str) -> str:
        met = Rendezvous(nodes_min=2, nodes_max=2, host="h", id=id_)
        return name_job(make_spec(RunOptions(script=script))[0], met).name

    assert name("/a/train.py", "") == "train"
    assert name("/a/train.py", "exp-7") == "exp-7"
    assert name("/a/train.py", "exp 7/../x") == "exp-7-..-x"
    assert len(name("/a/train.py", "x" * 200)) == 63


@pytest.mark.parametrize(
    ("text", "saves"),
    [
        ("import torch\n", False),
        ("import perdure\nrun = perdure.init()\n", True),
        ("if True:\n    from perdure.huggingface import attach\n", True),
        ("import perdure.elastic\n", False),
        ("import perdure\nfrom perdure import elastic\n", False),
        ("# import perdure\n", False),
    ],
)
def test_checkpoints_are_where_all_nodes_see_them_or_a_script_that_saves_is_refused(
    tmp_path: Path, text: str, saves: bool
) -> None:
    (tmp_path / "x.py").write_text(text)
    spec = make_spec(RunOptions(script=str(tmp_path / "x.py")))[0]
    apart, here = nodes.Place(True, "10.0.0.1", "10.0.0.1"), nodes.Place(True, "127.0.0.1", "")
    own = "/proc"  # On a disk of this machine alone, whatever the tests' folder is on.
    if saves:
        with pytest.raises(ConfigError, match="PERDURE_HOME of its own"):
            nodes.keep_checkpoints(spec, own, apart)
    else:
        assert nodes.keep_checkpoints(spec, own, apart) == spec
    kept = nodes.keep_checkpoints(spec, str(tmp_path), here)
    assert kept.checkpoint.url == f"{tmp_path}/jobs/{spec.name}/checkpoints"
    assert nodes.keep_checkpoints(kept, own, apart) == kept


@pytest.mark.parametrize(
    ("text", "changes", "address", "told"),
    [
        ("import perdure\n", {}, "10.0.0.7", True),
        ("import perdure\n", {"remote": 0}, "10.0.0.7", False),
        ("import perdure\n", {}, "127.0.0.1", False),
        ("import perdure\n", {"checkpoint": CheckpointConfig(url="/mnt/c")}, "10.0.0.7", False),
        ("import torch\n", {}, "10.0.0.7", False),
        ("import perdure.elastic\n", {}, "10.0.0.7", False),
    ],
)
def test_where_machines_that_join_would_not_see_the_checkpoints_is_told(
    tmp_path: Path, text: str, changes: dict[str, Any], address: str, told: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    spec = JobSpec(script="train.py", name="far", nodes=2, remote=1, cwd=str(tmp_path))
    spec = msgspec.structs.replace(spec, **changes)
    line = nodes.find_unseen_checkpoints(spec, "/proc", address)
    assert ("/proc/jobs/far/checkpoints" in line) is told
    assert ("[checkpoint] url" in line) is told


def meet(host: str, rank: int | None = None, address: str = "", join_s: float = 9.0) -> Rendezvous:
    return Rendezvous(
        nodes_min=2, nodes_max=2, host=host, rank=rank, address=address, join_s=join_s
    )


def test_who_has_the_endpoints_address_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "10.1.0.7")]
    known = {"host7": "10.0.0.7", "host8": "10.0.0.8", "out": "8.8.8.8", "me": "127.0.1.1"}
    monkeypatch.setattr(nodes, "list_interfaces", lambda: own)
    monkeypatch.setattr(nodes, "_look_up", lambda host: known.get(host, ""))
    monkeypatch.setattr(nodes, "_find_route", lambda other: "10.0.0.7")
    first, further = nodes.Place(True, "10.0.0.7", "10.0.0.7"), ("10.0.0.8", "10.0.0.7")
    assert find_place(meet("host7")) == first
    assert find_place(meet("host8")) == nodes.Place(False, *further)
    assert find_place(meet("host7", rank=0)) == first
    assert find_place(meet("host8", rank=1, address="10.1.0.7")).mine == "10.1.0.7"
    assert find_place(meet("me", rank=0)) == first, "Debian's own name is 127.0.1.1"
    assert find_place(meet(os.uname().nodename)) == first
    assert find_place(meet("host7", address="10.1.0.7")).address == "10.1.0.7"
    assert not find_place(meet("localhost")).first
    assert find_place(meet("localhost", rank=0)).first
    with pytest.raises(ConfigError, match=r"strangers may reach 8\.8\.8\.8"):
        find_place(meet("out"))
    with pytest.raises(ConfigError, match="not an address of this machine"):
        find_place(meet("host8", address="10.0.0.9"))
    monkeypatch.setattr(nodes, "_find_route", lambda other: "127.0.0.1")
    with pytest.raises(ConfigError, match="at which of its addresses"):
        find_place(meet("me", rank=0))


def picture(state: str, here: int) -> Snapshot:
    place = DeviceRow(device="cpu", node=0, ranks=(), replicas=(), state="idle")
    hosts = ["host" if node < here else "" for node in range(3)]
    return Snapshot(
        version=1, job="j", state=state, at_s=0.0, started_s=0.0, generation=-1, restarts=0,
        step=-1, steps_per_s=0.0, world_size=3, depth="supervised", reason="",
        devices=tuple(
            msgspec.structs.replace(place, node=node, host=host) for node, host in enumerate(hosts)
        ),
    )  # fmt: skip


def test_the_first_node_gives_up_where_the_others_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, stopped = JobSpec(script="x.py", nodes=3, remote=2), list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        monkeypatch.setattr(nodes, "_PATIENCE_S", 0.0)
        muster = Muster(spec, join_s=60.0)
        assert "2 of 3 nodes are here" in muster.look(picture("pending", 2))
        muster = Muster(spec, join_s=-1.0)
        assert "not all 3 nodes have come" in muster.look(picture("pending", 2))
        assert stopped == [signal.SIGTERM]
        assert muster.look(picture("pending", 2)) == "", "once"
        with pytest.raises(PlatformError, match="not all 3 nodes"):
            muster.judge_end()
        for state, here in (("pending", 3), ("running", 2), ("recovering", 0)):
            muster = Muster(spec, join_s=-1.0)
            assert muster.look(picture(state, here)) == ""
            assert muster.look(picture("pending", 2)) == "", "they have been here"
            muster.judge_end()
        assert stopped == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_name_that_nobody_knows_is_waited_for_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_look_up", lambda host: "")
    monkeypatch.setattr(nodes, "_RESOLVE_S", 0.01)
    said: list[str] = []
    with pytest.raises(PlatformError, match="nobody knows the address of host9"):
        find_place(meet("host9", join_s=0.05), said.append)
    assert said == ["nobody knows the address of host9 yet"], "once, not at each try"
