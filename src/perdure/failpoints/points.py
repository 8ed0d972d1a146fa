"""The points that there are: what is about to happen at each, or has happened, and which faults."""

from typing import NamedTuple


class Point(NamedTuple):
    """One place in the code, or several that do the same."""

    what: str
    """What is so when it is passed."""
    faults: tuple[str, ...] = ("crash", "delay")


_FULL = ("crash", "delay", "error")

POINTS: dict[str, Point] = {
    "file/read": Point("A document is about to be read. About: its name.", ("delay",)),
    "file/write": Point(
        "A file that is there whole or not at all is about to be written under a temporary name; "
        "`take` leaves the write short. About: its name.",
        (*_FULL, "take"),
    ),
    "file/rename": Point("It is written, and about to get its name.", _FULL),
    "file/renamed": Point("It has its name."),
    "journal/append": Point("A group of entries is about to be sent to the stream."),
    "journal/appended": Point("The group is on disk, and nothing has followed from it."),
    "journal/mirror": Point(
        "Entries are about to be written into the mirror; `take` leaves the write short.",
        (*_FULL, "take"),
    ),
    "stream/append": Point("JetStream is about to be asked to append.", _FULL),
    "stream/appended": Point("JetStream has appended; an error loses its answer.", _FULL),
    "snapshot/every": Point("`take` has a snapshot of memory after so many entries.", ("take",)),
    "snapshot/written": Point("A snapshot of a controller's memory is written."),
    "curves/append": Point(
        "What `run.log` told is about to be written; `take` leaves the write short.",
        (*_FULL, "take"),
    ),
    "curves/folded": Point(
        "New values are in what is kept, and in their own files as well.", _FULL
    ),
    "controller/replayed": Point("A controller knows what its journal knows, and serves nobody."),
    "controller/journaled": Point("A turn is on disk; no order of it is sent, nobody answered."),
    "controller/ordered": Point("An order was sent. About: to which node."),
    "controller/acknowledged": Point("The senders of a turn's events know that it has them."),
    "controller/ended": Point("The job's end is journaled, and the controller about to leave."),
    "inbox/taken": Point("Events have arrived. About: of whom."),
    "outbox/send": Point("Events are about to be sent to the controller. About: their sender."),
    "outbox/sent": Point("The controller has acknowledged them, and they are still queued."),
    "agent/order": Point("An order has arrived, and nothing was done of it."),
    "agent/ordered": Point("The order is carried out as far as the agent does it."),
    "agent/spawn": Point("The keeper is about to be told to start ranks."),
    "agent/exit": Point("The keeper has told of a rank's end, and nobody else knows of it."),
    "agent/worker-event": Point("A rank has told an event, which is not queued yet."),
    "agent/worker-ack": Point("The journal has a rank's event, and the rank is about to be told."),
    "keeper/order": Point("An order of the agent has arrived. About: its type."),
    "keeper/ordered": Point("It is carried out, or begun."),
    "keeper/prepare": Point("Rings and files of ranks are about to be made.", _FULL),
    "keeper/fork": Point("The image is about to be asked for ranks or a store. About: which."),
    "keeper/adopted": Point("Ranks that were started are known, and the agent is not told."),
    "keeper/looked": Point("Ranks are about to end, and were looked at for a save in progress."),
    "keeper/reaped": Point("A child has ended and is reaped; nothing was written down of it."),
    "keeper/recorded": Point("A rank's exit record is on disk, and the agent is not told."),
    "keeper/stopped": Point("Nothing of a generation is left, and the agent is not told."),
    "zygote/fork": Point("The image is about to fork what stands between it and ranks.", _FULL),
    "zygote/forked": Point("A rank is forked, and perhaps not all. In the process between."),
    "zygote/answer": Point("All are forked, and may not run yet. In the process between."),
    "rank/begin": Point("A forked rank may run, and the keeper is its parent."),
    "rank/order": Point("A rank's thread has read an order. About: its type."),
    "rank/event": Point("A rank has sent events to its agent."),
    "checkpoint/begin": Point("A rank is about to write its share.", _FULL),
    "checkpoint/written": Point("Its share is written and synced, and not read back.", _FULL),
    "checkpoint/hashed": Point("Its share was read back and is equal.", _FULL),
    "checkpoint/reported": Point("Its share is reported to rank 0."),
    "checkpoint/gathered": Point("Rank 0 has all shares, the index is written and read.", _FULL),
    "checkpoint/publish": Point("The directory is about to get its final name.", _FULL),
    "checkpoint/published": Point("It has it, and the folder is not synced.", _FULL),
    "checkpoint/tagged": Point("`latest` names it; nobody was told of it."),
    "checkpoint/surplus": Point("What is kept no longer is about to be removed."),
    "checkpoint/restore": Point("A rank is about to load the checkpoint that was chosen."),
    "checkpoint/upload": Point("A file is about to be put at the checkpoints' URL.", _FULL),
    "checkpoint/uploaded": Point("All of a checkpoint is there; `latest` is not it yet.", _FULL),
    "checkpoint/fetch": Point("A file of a checkpoint is about to be fetched.", _FULL),
    "elastic/ordered": Point("A member is told of a new world, and has met nobody."),
    "elastic/formed": Point("Its world is formed, and it has told nobody so."),
    "lighthouse/formed": Point("A quorum is kept on disk; none of its members is answered."),
    "supervisor/start": Point("A part is about to be started. About: its name."),
    "supervisor/started": Point("A part is started, and not written down."),
    "supervisor/ended": Point("A part has ended, and nothing has followed. About: its name."),
    "supervisor/leave": Point("The job has ended, and its parts are about to be let go."),
    "guard/begun": Point("It is about to wait for the supervisor's end."),
    "guard/woken": Point("The supervisor is gone, and nobody is killed."),
    "guard/kill": Point("What the job has left is about to be killed."),
    "rotation/copied": Point("The front of a log is copied, and still in it.", _FULL),
    "rotation/cut": Point("It is no more in the log, and the copy has not got its name.", _FULL),
    "queue/append": Point(
        "Records of a queue are about to be written; `take` leaves the write short.",
        (*_FULL, "take"),
    ),
    "queue/appended": Point("They are on disk, and nothing has followed from them."),
    "queue/spawn": Point("An attempt is written down, and its holder about to be started.", _FULL),
    "queue/claimed": Point("A holder has its attempt, and has started nothing."),
    "queue/forked": Point("Its command's process waits, and is not written down."),
    "queue/begun": Point("The command runs."),
    "queue/ended": Point("The command has ended, and it is not written down how."),
    "launch/sent": Point("Files, project and environment are on the box; nothing is looked at."),
    "launch/recorded": Point("The launch is remembered here, and the job not started there."),
    "launch/started": Point("The job runs there, and its commands may not find it yet."),
    "box/ask": Point("A command is about to be sent to a box."),
    "box/answered": Point("A box has answered, and nothing has followed."),
    "box/transfer": Point("Files are about to be brought to a box or from it."),
    "supervise/write": Point(
        "A document beside a launched job is about to be replaced. About: its name.", _FULL
    ),
    "supervise/started": Point("It says who runs the job, and the job is not started."),
    "supervise/forked": Point(
        "In the job's process, which nobody knows of, and which is nothing yet."
    ),
    "supervise/ended": Point("The job has ended, and it is not written down how."),
    "supervise/recorded": Point("How the job ended is written down."),
    "results/mend": Point("A script on the box is mended beside its place.", _FULL),
    "results/told": Point("The roster of what is on the box is made, and not told."),
    "pull/brought": Point("All files of a roster are here, and it is not written beside them."),
}
