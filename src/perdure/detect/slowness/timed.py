"""Which times of a rank tell who is slow: the host's, the device's, or none."""

import msgspec

from perdure.model.signals.progress import CollectiveSpan, CommProgress, RankProgress, Stamps

DEVICE: Stamps = "device"


def keep_timed(progress: RankProgress) -> RankProgress:
    """Return `progress` without the times that are of enqueuing only, and with the device's own.

    A host that runs ahead of its device waits in some arbitrary place, on one rank perhaps: neither
    when its collectives were entered nor where its steps went says who was slow. What was timed on
    the device becomes communicators and spans like the others; whose ranks are not known is left
    out, for nobody else's may be compared with it. Who sends and receives is kept with it: stages
    of a pipeline do not work alike.
    """
    untimed = {slot for slot, comm in enumerate(progress.comms) if comm.stamps == "enqueued"}
    if not untimed:
        return progress
    sent = bool(progress.device)
    spans = [s for s in progress.spans if s.comm not in untimed or (sent and s.peer >= 0)]
    comms = list(progress.comms)
    for timed in progress.device:
        of = progress.comms[timed.comm] if timed.comm in untimed else None
        if of is not None and of.size == len(of.ranks) > 1:
            slot, last = len(comms), max((s.seq for s in timed.spans), default=-1)
            comms.append(
                CommProgress(timed.name, of.size, last, last, ranks=of.ranks, stamps=DEVICE)
            )
            for s in timed.spans:
                spans.append(CollectiveSpan(slot, s.seq, s.op, s.bytes, s.start_s, s.end_s))
    return msgspec.structs.replace(progress, comms=tuple(comms), spans=tuple(spans), stages=())
