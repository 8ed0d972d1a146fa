"""What is wrong with a job and a profile under Slurm, before sbatch is asked."""

from collections.abc import Mapping

from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.model.platforms.slurm import JITTER_S, parse_time_limit
from perdure.traps.findings import error, finding, note, warning


def check_walltime(profile: Profile) -> list[Finding]:
    """Return whether the walltime leaves room for warning, jitter, start-up and a checkpoint."""
    section = profile.slurm
    warn_s, startup_s = section.warn_s, section.startup_s
    limit_s = parse_time_limit(section.time_limit)
    needed_s = warn_s + JITTER_S + startup_s
    return [
        *error(
            limit_s <= needed_s,
            f"time limit {limit_s} s leaves no time to train: the warning may come at "
            f"{max(0, limit_s - warn_s - JITTER_S)} s, before the first step at {startup_s} s",
            f"slurm.time_limit above {needed_s} s ({warn_s} warning + {JITTER_S} of "
            f"jitter + {startup_s} start-up), or a smaller slurm.warn_s",
            "SLURM2",
        ),
        *warning(
            warn_s - JITTER_S < section.checkpoint_s,
            f"a warning {warn_s} s before the walltime may come {JITTER_S} s late, and "
            f"a checkpoint takes {section.checkpoint_s} s",
            f"slurm.warn_s of {section.checkpoint_s + JITTER_S} or more",
            "SLURM2",
        ),
    ]


def check_nodes(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return whether several nodes see the same files."""
    return finding(
        "error" if profile.shared_fs is False else "warning",
        spec.num_nodes > 1 and profile.shared_fs is not True,
        f"{spec.num_nodes} nodes, and DURABLE_DIR is not known to be on a shared file system",
        "shared_fs = true in the profile, once you have looked",
        "SLURM5",
    )


def check_array(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return whether array tasks would write over one another."""
    url = spec.checkpoint.url
    return error(
        profile.slurm.array and url and "SLURM_ARRAY_TASK_ID" not in url,
        "all tasks of the array would write their checkpoints to one place",
        "leave checkpoint.url out: each task has a place of its own",
    )


def check_cluster(config: Mapping[str, str]) -> list[Finding]:
    """Return what the cluster's own configuration (`scontrol show config`) means for a job."""
    preempts = config.get("PreemptType", "preempt/none") != "preempt/none"
    warns = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
    return [
        *warning(
            config.get("JobRequeue") == "0",
            "JobRequeue=0: after a node failure the job may not come again",
            "--requeue in the script asks for it all the same",
            "SLURM2b",
        ),
        *note(
            preempts and not warns,
            "a preemption sends SIGTERM and no warning before; "
            f"KillWait {config.get('KillWait', '30 sec')}",
            "checkpoint.every_s bounds what it costs",
            "SLURM2",
        ),
        *note(
            config.get("AccountingStorageType", "").endswith("/none"),
            "accounting is off: how an attempt ended is told by scontrol for a while "
            f"({config.get('MinJobAge', '300 sec')}), then by perdure's own records",
            trap="SLURM4",
        ),
    ]
