"""A job for Slurm as files that a person can read: the sbatch script and what its program reads."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import msgspec

from perdure.launch.lint import check_plan
from perdure.launch.platforms import expand_tilde, locate_in_project, place_job, render_job
from perdure.launch.slurm.batch import Chain
from perdure.launch.slurm.containers import check_container, make_container, render_binds
from perdure.launch.ssh.render import render as render_ssh
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding, Plan, Step
from perdure.model.platforms.profile import Profile
from perdure.model.platforms.slurm import (
    JITTER_S,
    SlurmSection,
    count_nodes,
    list_tasks,
    parse_time_limit,
)
from perdure.traps.findings import error, finding, note, warning

SIGNAL = "USR1"
"""The warning. With TERM, Slurm's log says CANCELLED, and a shell without a trap dies at once."""

_ONE_TASK = "--ntasks-per-node=1"

_BODY = """\
set -u
{hooks}\
{env}\
place={place}
mkdir -p "$PERDURE_HOME" "$place"

# Warned before the handler stands, the warning is found as a file. The program starts with the
# signal ignored, since its default would end the run.
warned="$place/warned-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
child=
trap 'touch "$warned"; [ -z "$child" ] || kill -{signal} "$child" 2>/dev/null' {signal}
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
cd {cwd} || exit 2
(trap '' {signal}; exec {command} "$place" "$warned") &
child=$!
while :; do
    wait "$child"
    code=$?
    # A trap interrupts `wait`; only a child that is gone has ended.
    kill -0 "$child" 2>/dev/null || break
done
exit "$code"
"""

_JOIN = """\
# One more node of the job: sbatch join.sbatch [NAME [GRACE]]. Who comes again under the same name
# gets the place that it had; a warning (--signal) is a notice of GRACE seconds.
set -u
{hooks}\
{env}\
place={place}
cd {cwd} || exit 2
exec {command} "$place" {job} "${{1:-$SLURM_JOB_ID}}" "${{2:-{grace}}}"
"""
_NOT_OF_ONE = ("--job-name", "--nodes", _ONE_TASK, "--requeue", "--array", "--dependency",
               "--kill-on-invalid-dep")  # fmt: skip
_GRACE_S_MIN = 5

_CREDENTIALS = """\
if [ -n "$CRED_FILE" ] && [ -r "$CRED_FILE" ]; then set -a; . "$CRED_FILE"; set +a; fi
"""


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the script of `spec`, the job's document, and what sbatch is told."""
    if not profile.shared_fs and spec.num_nodes > 1:
        raise ConfigError("several nodes need a shared file system", hint="shared_fs = true")
    host, place = profile.launch.host, locate_job_folder(spec, profile)
    chain = Chain(
        requeue_max=profile.slurm.requeue_max,
        cpus=count_node_cpus(spec, profile.slurm),
        gres=render_gres(spec, profile.slurm),
        container=make_container(profile.slurm, list_seen(spec, profile)),
    )
    files = {
        "job.sbatch": render_script(spec, profile),
        "job.json": render_job(_place_job(spec, there=bool(host))),
        **({"join.sbatch": render_join(spec, profile)} if spec.remote else {}),
        "chain.json": msgspec.json.format(msgspec.json.encode(chain)).decode() + "\n",
    }
    steps: tuple[Step, ...] = (Step("submit it", ("sbatch", "--parsable", f"{place}/job.sbatch")),)
    tasks = list_tasks(profile.slurm.array)
    settings = {"jobs": {f"tasks/{t}": f"{spec.name}-{t}" for t in tasks} or {"job": spec.name}}
    if host:
        sent = render_ssh(spec, profile)
        files |= {name: sent.files[name] for name in ("env.sh", "setup.sh", "results.py")}
        command = ("ssh", host, f"cd {place} && sbatch --parsable job.sbatch")
        steps = (*sent.steps[:-1], Step("submit it", command))
        settings |= sent.settings
    return Plan(
        job=spec.name,
        kind="slurm",
        profile=profile,
        files=files,
        steps=steps,
        findings=(*check_plan(spec, profile), *check_job(spec, profile)),
        attach=(f"perdure attach {spec.name}", f"perdure watch {spec.name}"),
        place=os.path.dirname(place) if host else place,
        settings=settings,
    )


def _place_job(spec: JobSpec, *, there: bool) -> JobSpec:
    """Return the job as its nodes see it: in the project sent there, or where it is."""
    if there:
        return msgspec.structs.replace(place_job(spec), tee="all")
    locate_in_project(spec, spec.cwd, "cwd")
    cwd = os.path.normpath(os.path.join(spec.launch.project, spec.cwd))
    return msgspec.structs.replace(spec, cwd=cwd, tee="all")


def render_script(spec: JobSpec, profile: Profile) -> str:
    """Return the script."""
    lines = list_directives(spec, profile.slurm)
    return _fill(_BODY, spec, profile, lines, "perdure.launch.slurm.batch")


def render_join(spec: JobSpec, profile: Profile) -> str:
    """Return the script of one further node that is a Slurm job of its own.

    It is not put back: who has it come again submits it again.
    """
    lines = [
        f"--job-name={name_join(spec)}",
        "--nodes=1",
        _ONE_TASK,
        *(
            line
            for line in list_directives(spec, profile.slurm)
            if not line.startswith(_NOT_OF_ONE)
        ),
        "--no-requeue",
    ]
    return _fill(_JOIN, spec, profile, lines, "perdure.launch.slurm.joined")


def name_join(spec: JobSpec) -> str:
    """Return what Slurm calls a further node that is a job of its own."""
    return f"{spec.name}-node"


def _fill(
    body: str, spec: JobSpec, profile: Profile, directives: Sequence[str], module: str
) -> str:
    """Return a script that runs one of perdure's programs in the job's environment."""
    section, there = profile.slurm, bool(profile.launch.host)
    modules = "".join(f"module load {shlex.quote(name)}\n" for name in section.modules)
    hook = f"{profile.overrides.PROXY_HOOK}\n" if profile.overrides.PROXY_HOOK and not there else ""
    place = locate_job_folder(spec, profile)
    if there:
        # What `perdure launch` wrote there says the rest: PERDURE_HOME, and the Python it found.
        env = f". {quote(place)}/env.sh\n" + _CREDENTIALS
        python, cwd, output = '"$PERDURE_PYTHON"', '"$JOB_DIR/project"', f"slurm-{spec.name}-%j.out"
    else:
        env = f"export PERDURE_HOME={quote(locate_home(profile))}\n"
        python, cwd = quote(choose_python(profile)), quote(spec.launch.project)
        folder = spec.launch.project.replace("%", "%%")  # It would begin a pattern.
        output = f"{folder}/slurm-{spec.name}-%j.out"
    output = f'"{output}"' if " " in output else output
    filled = body.format(
        hooks=modules + hook,
        env=env + render_binds(section, list_seen(spec, profile)),
        place=quote(place),
        signal=SIGNAL,
        cwd=cwd,
        command=f"{python} -P -m {module}",
        job=spec.name,
        grace=max(_GRACE_S_MIN, section.warn_s - JITTER_S),
    )
    head = "".join(f"#SBATCH {line}\n" for line in directives)
    return f"#!/bin/bash\n{head}#SBATCH --output={output}\n{filled}"


def list_directives(spec: JobSpec, section: SlurmSection) -> list[str]:
    """Return the options of sbatch, without `#SBATCH`."""
    named = ("partition", "account", "qos", "constraint", "mem", "array")
    values = {
        **{name: getattr(section, name) for name in named},
        "gres": render_gres(spec, section),
        "dependency": section.dependency,
    }
    fewest, most = count_nodes(spec)
    # With its tasks named, Slurm takes the fewest nodes of a range, however many are idle.
    nodes = [f"--nodes={fewest}-{most}"] if most > fewest else [f"--nodes={most}", _ONE_TASK]
    return [
        f"--job-name={spec.name}",
        *nodes,
        f"--cpus-per-task={count_node_cpus(spec, section)}",
        f"--time={section.time_limit}",
        f"--signal=B:{SIGNAL}@{section.warn_s}",
        "--requeue",
        "--open-mode=append",
        *(f"--{name}={value}" for name, value in values.items() if value),
        # Else a job whose dependency failed waits for ever.
        *(["--kill-on-invalid-dep=yes"] if section.dependency else []),
        *section.extra,
    ]


def list_seen(spec: JobSpec, profile: Profile) -> list[str]:
    """Return the folders that a container has to see as they are, variables unexpanded."""
    url, durable = spec.checkpoint.url, expand_tilde(profile.overrides.DURABLE_DIR)
    project = "$JOB_DIR" if profile.launch.host else spec.launch.project
    return [project, durable, *([expand_tilde(url)] if url.startswith(("/", "$", "~")) else [])]


def choose_python(profile: Profile) -> str:
    """Return the Python of the job: the profile's, or else the one that renders."""
    named = profile.launch.python
    return sys.executable if named == "python3" else named


def count_node_cpus(spec: JobSpec, section: SlurmSection) -> int:
    """Return the cores of a node."""
    return section.cpus_per_task or spec.node_ranks


def render_gres(spec: JobSpec, section: SlurmSection) -> str:
    """Return the devices of a node, as `--gres` takes them."""
    return section.gres or (f"gpu:{spec.launch.gpus}" if spec.launch.gpus else "")


def locate_home(profile: Profile) -> str:
    """Return PERDURE_HOME of the job, variables unexpanded."""
    return f"{profile.overrides.DURABLE_DIR}/state"


def locate_job_folder(spec: JobSpec, profile: Profile) -> str:
    """Return the folder of the job's own files, variables unexpanded."""
    if profile.launch.host:
        return f"{expand_tilde(profile.overrides.DATA_DIR)}/{spec.name}/launch"
    return f"{profile.overrides.DURABLE_DIR}/launched/{spec.name}"


def quote(path: str) -> str:
    """Return a path for the shell, in which `$NAME` and a leading `~` are still expanded."""
    path = expand_tilde(path)
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'


def check_job(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what is wrong with a job and a profile under Slurm, before sbatch is asked.

    The walltime has to leave room for warning, jitter, start-up and a checkpoint; several nodes
    have to see the same files; and tasks of an array must not write over one another.
    """
    section, url = profile.slurm, spec.checkpoint.url
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
        *finding(
            "error" if profile.shared_fs is False else "warning",
            spec.num_nodes > 1 and profile.shared_fs is not True,
            f"{spec.num_nodes} nodes, and DURABLE_DIR is not known to be on a shared file system",
            "shared_fs = true in the profile, once you have looked",
            "SLURM5",
        ),
        *check_container(section, gpus=bool(render_gres(spec, section)), groups=bool(spec.groups)),
        *error(
            spec.growth and (spec.groups or not spec.unordered.leaves),
            "nodes_max: replica groups, and a world that is only observed, do not grow",
            "nodes alone",
        ),
        *error(
            section.array and url and "SLURM_ARRAY_TASK_ID" not in url,
            "all tasks of the array would write their checkpoints to one place",
            "leave checkpoint.url out: each task has a place of its own",
        ),
    ]


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
