"""The commands a person can type: where each is, what for, and its line in the help.

The help and the completion of a shell are made of this table, so that neither imports a command.
`tests/unit/cli/test_commands.py` holds that each summary is what its command says of itself.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One command of the table."""

    module: str
    """Below `perdure.cli`; empty: a plug-in has it (`plugins.py`)."""
    summary: str
    """The first sentence of its docstring."""


FIRST_DAY = (
    "init", "run", "status", "watch", "dash", "logs", "diagnose", "report", "set", "stop",
)  # fmt: skip
"""What a new user needs: the help has a line for each, and for the others a line a panel."""
LAB = "Laboratory (perdure-lab)"
PANELS: dict[str, dict[str, Entry]] = {
    "Run a job": {
        "init": Entry(
            "adopting.init", "Write a job file for a training script, and propose its lines."
        ),
        "run": Entry("running.run", "Run a training script on this machine, and keep it running."),
        "launch": Entry(
            "platforms.launch", "Check a job for a platform, submit it and leave it running."
        ),
        "attach": Entry(
            "platforms.remote", "Follow a job's output to its end; leave with its exit code."
        ),
        "serve": Entry(
            "running.serve", "Serve torchft replica groups that others start by torchrun."
        ),
        "queue": Entry("queue", "Many runs, each until it is done."),
    },
    "See what it does": {
        "status": Entry("looking.look", "List jobs, or show one: its state and each rank."),
        "watch": Entry("looking.watch", "Watch jobs live, and steer them by keys."),
        "dash": Entry(
            "page.dash",
            "Show jobs as a live page in a browser, as they are or were.",
        ),
        "logs": Entry("looking.output", "Show what the ranks wrote."),
        "events": Entry(
            "looking.output", "Show the journal: what happened, what was decided, and why."
        ),
        "metrics": Entry(
            "looking.metrics", "Hand a job's metrics to Prometheus, TensorBoard and others."
        ),
    },
    "Know what happened": {
        "diagnose": Entry(
            "looking.diagnosis", "Say what went wrong: each verdict with culprit and evidence."
        ),
        "report": Entry(
            "looking.report", "Print the ledger of the paid time, and each recovery by phase."
        ),
        "bundle": Entry("looking.bundle", "Write one redacted archive of a job for a bug report."),
    },
    "Steer it while it runs": {
        "set": Entry(
            "steering.act", "Change settings of a running job, on all ranks from one step on."
        ),
        "pause": Entry("steering.act", "Have all ranks stand still before the same step."),
        "resume": Entry("steering.act", "Let a paused job go on, or start an ended one again."),
        "checkpoint": Entry("steering.act", "Save a checkpoint at a step that all ranks agree on."),
        "stop": Entry("steering.act", "End the job, after a checkpoint at an agreed step."),
        "restart": Entry(
            "steering.act", "Restart the ranks, from a checkpoint that they save first."
        ),
        "note": Entry("steering.act", "Keep a remark in the job's journal, for report and curves."),
        "inject": Entry("steering.act", "Harm a rank on purpose, to see what happens."),
    },
    "Other machines": {
        "node": Entry("steering.node", "Nodes that come and go."),
        "profiles": Entry(
            "platforms.profiles", "List the platforms, or show one: each value and its source."
        ),
        "pull": Entry(
            "platforms.pull", "Bring a job's checkpoints, journal, logs and outputs here."
        ),
        "teardown": Entry(
            "platforms.teardown", "Stop the meter, once all was pulled and verified."
        ),
    },
    "Check and tidy up": {
        "doctor": Entry(
            "looking.doctor", "Check what perdure can see and do here, or for a job or profile."
        ),
        "verify": Entry("checkpoints", "Read checkpoints back and compare sizes and hashes."),
        "rm": Entry("removal", "Remove jobs that have ended, with their checkpoints and logs."),
        "completion": Entry(
            "completion", "Print what makes bash, zsh or fish complete commands and jobs."
        ),
        "drill": Entry("drill", "Rehearse a job: harm a copy of it, and grade what follows."),
    },
    LAB: {
        "profile": Entry("", "Measure what a model's blocks and links cost, for `plan`."),
        "plan": Entry("", "Choose D, P, micro-batch, recompute, schedule and placement."),
        "trace": Entry("", "Recorded availability: show, convert, generate, simulate, replay."),
    },
}
"""What a person wants -> the commands for it."""

COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    **{
        verb: (f"node {verb}", {})
        for verb in ("drain", "cordon", "evict", "restore", "notify", "invite", "join", "scale")
    },
    "ps": ("status", {}),
    "map": ("status --devices", {}),
    "remind": ("status --remind", {}),
    "tunnel": ("status", {}),
    "compare": ("report", {}),
    "render": ("launch --dry-run --out -", {}),
    "image": ("launch --write-image -", {"--out": "--write-image"}),
    "forget": ("teardown --forget", {}),
    "prune": ("rm", {"--free": "--checkpoints-until"}),
    "schema": ("doctor --schema", {}),
}
"""Old name -> what takes its place for this release, and its options that are called otherwise.

Neither the help nor a shell's completion shows them.
"""
