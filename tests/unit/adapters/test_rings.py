import threading
import time

from perdure.adapters.rings import read_ring
from perdure.worker.ring import RingWriter


def test_a_reader_beside_a_busy_writer_sees_whole_states(tmp_path):
    path = str(tmp_path / "r.ring")
    ring = RingWriter.create(path, rank=0, generation=0)
    done = threading.Event()

    def write():
        step = 0
        while not done.is_set():
            step += 1
            ring.commit(step, step, step, (1_000_000_000, 0, 0, 0), phase=5)
            time.sleep(0)  # Hands over the GIL, which a process of its own would not need.

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    whole = 0
    try:
        for _ in range(50_000):
            reading = read_ring(path, 0.0)
            if not reading.torn:
                whole += 1
                assert reading.account.step_s == max(reading.account.step, 0)
            if whole > 50:
                break
    finally:
        done.set()
        writer.join()
    assert whole > 50  # The writer does nothing else here; a training thread hardly ever writes.
