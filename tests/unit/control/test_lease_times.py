"""When a holder has to stop: counted from before it asked, so that a rival's wait is longer."""

from perdure.control.lease import (
    Lease,
    LeaseDue,
    LeaseRead,
    LeaseTimes,
    LeaseWritten,
    ReadLease,
    TakeOver,
    WriteLease,
)

TIMES = LeaseTimes(ttl_s=1.5, renew_s=0.4, margin_s=0.3)


def take(lease: Lease, now: float) -> None:
    assert lease.handle(now, LeaseDue()) == [ReadLease()]
    assert lease.handle(now, LeaseRead(revision=0, holder="")) == [WriteLease(expected=0)]


def test_an_answer_that_was_long_under_way_makes_the_lease_no_longer() -> None:
    lease = Lease(me="a", times=TIMES)
    take(lease, 10.0)
    assert lease.handle(10.45, LeaseWritten(revision=1)) == [TakeOver(term=1)]
    assert lease.may_act(11.49)
    assert not lease.may_act(11.5)
    assert lease.handle(10.5, LeaseDue()) == [WriteLease(expected=1)]
    lease.handle(10.9, LeaseWritten(revision=2))
    assert lease.may_act(11.99)
    assert not lease.may_act(12.0)


def test_a_rival_waits_longer_than_any_holder_that_it_has_seen_may_act() -> None:
    rival = Lease(me="b", times=TIMES)
    rival.handle(20.0, LeaseDue())
    assert rival.handle(20.1, LeaseRead(revision=7, holder="a")) == []
    for now in (20.5, 21.0, 21.8):
        assert rival.handle(now, LeaseDue()) == [ReadLease()]
        assert rival.handle(now + 0.05, LeaseRead(revision=7, holder="a")) == []
    assert rival.handle(22.3, LeaseDue()) == [ReadLease()]
    taken = rival.handle(22.3, LeaseRead(revision=7, holder="a"))
    assert taken == [WriteLease(expected=7)], "the same write was seen for 1.8 s"
