from pathlib import Path

from perdure.adapters.nics import NicReader
from perdure.model.signals.links import NicSample


def _write(root: Path, values: dict[str, object]) -> None:
    for name, value in values.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def test_ethernet_and_rdma_counters_grow(tmp_path: Path) -> None:
    eth, ib = "class/net/eth1", "class/infiniband/mlx5_0/ports/1"
    _write(
        tmp_path,
        {
            f"{eth}/operstate": "up",
            f"{eth}/statistics/tx_bytes": 1000,
            f"{eth}/statistics/rx_bytes": 2000,
            f"{eth}/statistics/rx_dropped": 3,
            f"{ib}/state": "4: ACTIVE",
            f"{ib}/counters/port_xmit_data": 100,
            f"{ib}/counters/port_rcv_data": 200,
            f"{ib}/counters/link_downed": 1,
            f"{ib}/hw_counters/out_of_sequence": 0,
            "class/net/other/statistics/tx_bytes": 5,
        },
    )
    reader = NicReader(str(tmp_path))
    assert reader.sample(["eth1"]) == ()  # What grew since the boot is nobody's news.
    _write(
        tmp_path,
        {
            f"{eth}/operstate": "down",
            f"{eth}/statistics/tx_bytes": 1500,
            f"{eth}/statistics/rx_dropped": 5,
            f"{ib}/state": "1: DOWN",
            f"{ib}/counters/port_xmit_data": 350,
            f"{ib}/counters/link_downed": 2,
            f"{ib}/hw_counters/out_of_sequence": 7,
        },
    )
    assert reader.sample(["eth1"]) == (
        NicSample("eth1", "ethernet", False, 500, 0, 2),
        NicSample("mlx5_0/1", "rdma", False, 1000, 0, 8),
    )


def test_a_machine_without_either(tmp_path: Path) -> None:
    reader = NicReader(str(tmp_path))
    reader.sample(["eth9"])
    assert reader.sample(["eth9"]) == (NicSample("eth9", "ethernet", False, 0, 0, 0),)
