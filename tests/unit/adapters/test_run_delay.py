"""What neighbours take from a process, summed over its threads."""

import os
import threading

from perdure.adapters.host import ProcSampler, ProcStat


def test_the_wait_for_a_cpu_of_all_threads_is_seen_and_never_falls():
    stat = ProcStat(os.getpid())
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    stat.follow_threads()
    first_s = stat.measure_delay()
    over.set()
    thread.join()
    last_s = stat.measure_delay()
    stat.close()
    assert 0.0 < first_s <= last_s


def test_a_sample_has_it():
    sampler = ProcSampler()
    sampler.watch([os.getpid()])
    assert sampler.sample(os.getpid(), 1.0).run_delay_s > 0.0
    sampler.watch([])
