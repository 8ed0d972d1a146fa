"""T1 and T3 on a real nats-server that takes small messages: everything passes, cut if need be."""

import math
from pathlib import Path

import pytest

from perdure.adapters.nats import NatsBus, NatsStream
from perdure.model.events import MetricsLogged, RankExited, RankJoined
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from tests.contract.test_bus import Server
from tests.stream import open_stream
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("payload_max", [64 << 10, 1 << 20])
async def test_everything_passes_a_server_of_small_messages(
    tmp_path: Path, payload_max: int
) -> None:
    server = Server(tmp_path)
    endpoint = server.start(payload_max)
    buses = [await NatsBus.connect(endpoint, timeout_s=PATIENCE_S) for _ in range(2)]
    try:
        assert buses[0].payload_max == payload_max
        stream = await NatsStream.open(buses[1], "job")
        async with (
            open_stream(str(tmp_path / "a"), stream, *buses) as (whole, connect),
            connect(1) as rank,
        ):
            record = ExitRecord(
                rank=1, generation=0, pid=7, at_s=1.0, code=1, traceback="\x1b" * 2_000_000
            )
            end = RankExited(node=0, record=record, account=RankAccount(), detected_s=1.0)
            rows = ((1, {f"metric-{n}": math.nan for n in range(2_000)}),)
            for seq in range(1, 33):
                await rank.emit(seq, MetricsLogged(generation=0, rows=rows))
            await rank.send(b'{"type":"WorkerEvent","seq":33,"event":"\xff')
            await rank.emit(34, RankJoined(generation=0, rank=1, start_step=5))
            await rank.until_acked(34)
            whole.outbox.put(end)
            assert await whole.outbox.flush(PATIENCE_S)
            bodies = await whole.bodies()
            (told,) = [body for body in bodies if isinstance(body, RankExited)]
            assert "characters, cut]" in told.record.traceback
            assert RankJoined(generation=0, rank=1, start_step=5) in bodies
            assert not any(isinstance(body, MetricsLogged) for body in bodies)
            curves = whole.curves()
            told_values = 32 * len(curves.curves) if payload_max == 1 << 20 else 0
            assert sum(one.count for one in curves.dropped.values()) + told_values == 64_000
    finally:
        for bus in buses:
            await bus.close()
        server.close()
