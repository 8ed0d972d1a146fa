"""A link that loses one direction: the end that hears nothing is not the one that loses."""

from msgspec.structs import replace

from perdure.detect.slowness.links import LinkWatch
from perdure.model.signals.links import LinkSample, LinkSweep


def look(now, *samples):
    watch = LinkWatch(lambda rank: rank)
    for src, dst, backoff, last_ack_s, ago_s in samples:
        sample = LinkSample(src, dst, "0", 0, 1.0, 1e-3, 1, 1000, backoff, last_ack_s)
        watch.take(now - ago_s, LinkSweep(now - ago_s, 0.2, (sample,)))
    return watch, watch.list_stuck_links(now)


def test_who_is_heard_but_hears_nothing_sends_well_and_its_peer_loses():
    watch, stuck = look(10.0, (0, 1, 2, 0.7, 0.0), (1, 0, 2, 1.5, 0.0))
    assert [(x.src, x.dst) for x in stuck] == [(0, 1)]
    place = watch.place(10.0, stuck, "stuck")
    assert (place.link, place.probe) == ((0, 1), ())


def test_a_cable_is_both_ways_and_left_to_the_probe():
    watch, stuck = look(10.0, (0, 1, 2, 1.4, 0.0), (1, 0, 2, 1.5, 0.0))
    assert {(x.src, x.dst) for x in stuck} == {(0, 1), (1, 0)}
    assert watch.place(10.0, stuck, "stuck").probe == (0, 1)


def test_a_look_from_before_the_trouble_proves_nothing():
    _, stuck = look(10.0, (1, 0, 0, 0.0, 1.6), (0, 1, 2, 1.5, 0.0))
    assert [(x.src, x.dst) for x in stuck] == [(0, 1)]


def test_tries_that_are_told_of_late_were_no_later_than_they_were():
    """A partition holds heartbeats back, and they arrive together once it is over."""

    def say(watch, now, at_s, backoff):
        sample = LinkSample(0, 1, "0", 0, 1.0, 1e-3, 1, 1000, backoff, at_s)
        watch.take(now, LinkSweep(at_s, 0.2, (sample,)))

    watch = LinkWatch(lambda rank: rank)
    for at_s, backoff in ((2.8, 3), (3.2, 4), (6.0, 4), (6.4, 5), (9.0, 5)):
        say(watch, 9.1, at_s, backoff)
    assert watch.is_in_vain(9.5, 6.0)
    assert not watch.is_in_vain(9.5, 6.1)
    say(watch, 12.8, 12.4, 5)
    say(watch, 12.8, 12.6, 6)
    assert not watch.is_in_vain(12.8, 10.0), "the answer may be on its way"
    say(watch, 13.0, 12.8, 6)
    assert watch.is_in_vain(13.0, 10.0)


def test_what_a_link_costs_is_counted_over_a_step():
    """Twice as busy for one second is a tenth of a step of ten, and no cause of a slow one."""

    def cost(step_s):
        watch = LinkWatch(lambda rank: rank)
        watch.step_s = step_s
        for i in range(200):
            busy_s = 0.9 if i == 199 else 0.2
            sample = LinkSample(0, 1, "0", 50_000_000, busy_s, 1e-3, 0, 0, 0, 0.0)
            watch.take(float(i), LinkSweep(float(i), 1.0, (sample,)))
        return watch.links[0, 1].cost

    assert 0.4 < cost(0.3) < 0.8
    assert 0.0 < cost(10.0) < 0.1


def test_a_link_that_another_counts_now_is_not_compared_with_what_it_was():
    """NCCL's bytes go by InfiniBand; gloo's, between the same two at times, by a slower card."""

    def say(watch, now, source, cell_ms):
        samples = [
            LinkSample(src, (src + 1) % 4, "0", 100_000_000, cell_ms / 10, 1e-3, 0, 0, 0, 0.0)
            for src in ((0,) if source == "kernel" else range(4))
        ]
        samples = [replace(sample, source=source) for sample in samples]
        watch.take(now, LinkSweep(now, 1.0, tuple(samples)))

    watch = LinkWatch(lambda rank: rank)
    for second in range(20):
        say(watch, float(second), "nccl", 0.04)
    for second in range(20, 40):
        say(watch, float(second), "kernel", 8.0)
        assert not watch.list_slow_links(float(second), fused=True)
    say(watch, 40.0, "kernel", 40.0)
    say(watch, 41.0, "kernel", 40.0)
    assert [x.ends for x in watch.list_slow_links(41.0, fused=True)] == [(0, 1)]
