"""A job for a box with nothing but SSH, as files that a person can read. Nothing is touched.

On the box, below $DATA_DIR/JOB: `project` is what was sent, `launch` holds these files and what the
supervisor writes. Job state and checkpoints are under $DURABLE_DIR/state.
"""

import os
import re
import shlex
from pathlib import Path

import msgspec

from perdure.launch.lint import check_plan
from perdure.launch.platforms import expand_tilde, locate_in_project, place_job, render_job
from perdure.launch.wheel import MODULES, choose_extras, compute_digest, name_wheel, read_program
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding, Plan, Step
from perdure.model.platforms.profile import HOST_DEPENDENT, Profile
from perdure.traps.findings import error, note, warning

_HERE = Path(__file__).resolve().parent
NETWORK = "network.sh"
"""What is a box's own among several: its address and interface. Found at the launch."""
INVITATION = "credentials/invitation.json"
"""Below a further box's `launch`: how it joins. It holds a secret, and is not pulled."""
KEPT_ENDPOINT = "credentials/door.json"
"""Below the first box's `launch`: what lets invitations outlive its reboot. Secret, not pulled."""

_PERDURE = ("$PERDURE_PYTHON", "-P", "-m", "perdure")
_MAKE_WAIT_S = 1800.0
"""Waited for another launch that makes the same environment."""

_WAYS = {
    "tmux": """\
if command -v tmux >/dev/null; then
  socket="$JOB_DIR/launch/tmux" # Of its own: the one under /tmp may be cleaned away.
  if [ ${#socket} -ge 100 ]; then # Paths of sockets are short; a stranger's would be obeyed.
    known="$JOB_DIR/launch/tmux-folder"
    [ -O "$(cat "$known" 2>/dev/null)" ] || mktemp -d /tmp/perdure-tmux-XXXXXXXX >"$known"
    socket="$(cat "$known")/tmux"
  fi
  tmux -S "$socket" has-session -t run 2>/dev/null || # Else it was started, and nobody was told.
    tmux -S "$socket" new-session -d -s run 'exec sh ./run.sh'
  exit 0
fi""",
    "setsid": """\
if command -v setsid >/dev/null; then
  setsid nohup sh ./run.sh </dev/null >>run.out 2>&1 &
  exit 0
fi""",
    "systemd-run": """\
if command -v systemd-run >/dev/null && systemd-run --user --scope true 2>/dev/null; then
  setsid nohup systemd-run --user --scope sh ./run.sh </dev/null >>run.out 2>&1 &
  exit 0
fi""",
}
"""How start.sh severs the job from the connection, by the tool that does it."""


def fill(script: str, **values: str) -> str:
    """Return one of the shell scripts beside this file with `@name@` filled in."""
    text = (_HERE / "scripts" / script).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the plan of `spec` on the box of `profile`, or on all of its boxes.

    Raises:
        ConfigError: a path lies outside the project, or there are not as many boxes as nodes.
    """
    launch = profile.launch
    if len(launch.hosts) < 2:
        host = launch.host or next(iter(launch.hosts), "")
        return _render_box(spec, _place_profile(profile, host), spec.name, _list_run())
    _check_hosts(spec, profile)
    run = [*_list_run(), "--placement", "$JOB_DIR/launch/placement.json"]
    first = _render_box(spec, _place_profile(profile, launch.hosts[0]), spec.name, run)
    join = _list_join(spec)
    others = tuple(
        _render_box(spec, _place_profile(profile, host), f"{spec.name}+{name_box(host)}", join)
        for host in launch.hosts[1:]
    )
    return msgspec.structs.replace(first, others=others)


def name_box(host: str) -> str:
    """Return a box's name as that of a file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host)


def _place_profile(profile: Profile, host: str) -> Profile:
    """Return the profile of one of its boxes."""
    launch = msgspec.structs.replace(profile.launch, host=host)
    teardown = profile.teardown
    if teardown.ids:
        own = dict(zip(profile.launch.hosts, teardown.ids, strict=True))
        teardown = msgspec.structs.replace(teardown, id=own[host])
    return msgspec.structs.replace(profile, launch=launch, teardown=teardown)


def _check_hosts(spec: JobSpec, profile: Profile) -> None:
    launch, ids = profile.launch, profile.teardown.ids
    count = len(launch.hosts)
    for wrong, text, hint in (
        (
            launch.host not in ("", launch.hosts[0]),
            f"launch.host = {launch.host} is not the first of launch.hosts",
            "leave it out",
        ),
        (
            len({name_box(host) for host in launch.hosts}) < count,
            "launch.hosts names a box twice",
            "a node is a box of its own",
        ),
        (
            len(launch.addresses) not in (0, count),
            f"launch.addresses: {len(launch.addresses)} for {count} boxes",
            "",
        ),
        (len(ids) not in (0, count), f"teardown.ids: {len(ids)} for {count} boxes", ""),
        (
            spec.num_nodes != count,
            f"launch.hosts names {count} boxes, and the job has {spec.num_nodes} nodes",
            f"nodes = {count}, or fewer and whole nodes of spares",
        ),
        (
            spec.groups,
            "launch.hosts: torchft's groups are on one box only",
            "their lighthouse is reached by nobody else: name one box",
        ),
    ):
        if wrong:
            raise ConfigError(text, hint=hint)


def _list_run() -> list[str]:
    """Return the command of the box with the controller; variables are those of env.sh."""
    return [*_PERDURE, "run", "--config", "$JOB_DIR/launch/job.json"]


def _list_join(spec: JobSpec) -> list[str]:
    """Return the command of each other box."""
    cwd = os.path.normpath(f"$JOB_DIR/project/{locate_in_project(spec, spec.cwd, 'cwd')}")
    where = [f"$JOB_DIR/launch/{INVITATION}", "--address", "$PERDURE_NODE_ADDRESS", "--cwd", cwd]
    return [*_PERDURE, "node", "join", *where, "--wait", f"{spec.bus.orphan_s:g}"]


def _render_box(spec: JobSpec, profile: Profile, folder: str, command: list[str]) -> Plan:
    """Return the plan of one box, where the job's folder is called `folder`."""
    job_dir = f"{expand_tilde(profile.overrides.DATA_DIR)}/{folder}"
    spec = place_checkpoints(spec, profile)
    files = {
        "job.json": render_job(place_job(spec, len(profile.launch.hosts))),
        "env.sh": render_environment(spec, profile, folder),
        "setup.sh": _render_setup(spec, profile),
        "start.sh": _render_start(profile),
        "run.sh": fill("run.sh"),
        "settings.json": _render_settings(spec, profile, command),
        "box.py": read_program("box.py"),
        "results.py": read_program("results.py"),
    }
    relaunch = profile.interruption.relaunch != "none"
    if relaunch:
        files["relaunch.sh"] = fill(f"{profile.interruption.relaunch}.sh", job=folder)
    return Plan(
        job=spec.name,
        kind="ssh",
        profile=profile,
        files=files,
        steps=_list_steps(spec, profile, job_dir, relaunch),
        findings=(*check_plan(spec, profile), *_check(spec, profile)),
        attach=(
            f"perdure attach {spec.name}",
            f"perdure status {spec.name}",
            f"perdure pull {spec.name} DIR",
        ),
        place=job_dir,
        settings={
            "project": spec.launch.project,
            "exclude": spec.launch.exclude,
            "outputs": tuple(locate_in_project(spec, o, "output") for o in spec.launch.outputs),
            "checkpoints": spec.checkpoint.url,
            "cwd": spec.cwd,
            "secrets": spec.launch.secrets,
            "relaunch": relaunch,
        },
    )


def place_checkpoints(spec: JobSpec, profile: Profile) -> JobSpec:
    """Return the job with one place for the checkpoints of all boxes, where they share a disk."""
    if spec.checkpoint.url or len(profile.launch.hosts) < 2 or profile.shared_fs is not True:
        return spec
    return msgspec.structs.replace(
        spec,
        checkpoint=msgspec.structs.replace(
            spec.checkpoint, url=f"$DURABLE_DIR/checkpoints/{spec.name}"
        ),
    )


def render_environment(spec: JobSpec, profile: Profile, folder: str) -> str:
    """Return the shell file that says where things are on the box."""
    overrides = profile.overrides
    credentials = f"{overrides.CRED_FILE}-{folder}" if overrides.CRED_FILE else ""
    values = {
        "DATA_DIR": overrides.DATA_DIR,
        "DURABLE_DIR": overrides.DURABLE_DIR,
        "HF_HOME": overrides.HF_HOME,
        "CRED_FILE": credentials,
        "JOB_DIR": f"$DATA_DIR/{folder}",
        # Of two machines with one PERDURE_HOME, each would take the other's job for its own.
        "PERDURE_HOME": "$DURABLE_DIR/" + ("state" if folder == spec.name else f"nodes/{folder}"),
    }
    if profile.mirror not in ("", HOST_DEPENDENT):
        values["HF_ENDPOINT"] = profile.mirror
    network = f'"$JOB_DIR/launch/{NETWORK}"'
    find_network = f"if [ -r {network} ]; then . {network}; fi # Where other boxes reach it."
    lines = [
        "# Where things are on this box: read by this job's scripts and by perdure's commands.",
        *([overrides.PROXY_HOOK] if overrides.PROXY_HOOK else []),
        *(f'export {name}="{expand_tilde(value)}"' for name, value in values.items()),
        'export PERDURE_PYTHON="$(cat "$JOB_DIR/launch/python" 2>/dev/null)"',
        *([find_network] if len(profile.launch.hosts) > 1 else []),
    ]
    return "\n".join(lines) + "\n"


def _render_settings(spec: JobSpec, profile: Profile, command: list[str]) -> str:
    """Return what the supervisor runs; variables are those of env.sh."""
    ranks = spec.nproc if len(profile.launch.hosts) > 1 else spec.machine_ranks
    settings = {
        "command": command,
        "cwd": "$JOB_DIR/project",
        "gpus": spec.launch.gpus or ranks,
    }
    return msgspec.json.format(msgspec.json.encode(settings)).decode() + "\n"


def _render_setup(spec: JobSpec, profile: Profile) -> str:
    launch, digest, extras = profile.launch, compute_digest(), choose_extras(spec)
    wishes = [shlex.quote(package) for package in launch.packages]
    lists = "/dev/null"
    if spec.launch.requirements:
        inside = locate_in_project(spec, spec.launch.requirements, "launch.requirements")
        lists = f'"$JOB_DIR/project/{inside}"'
        wishes += ["-r", lists]
    native = '"$python" -P -m perdure.worker.native || say "no compiled recorder"'
    return fill(
        "setup.sh",
        digest=digest,
        mode=launch.environment,
        extras=",".join(extras),
        modules=" ".join(module for extra in extras for module in MODULES[extra]),
        python=expand_tilde(launch.python),
        wishes=" ".join(wishes),
        plain="no" if wishes else "yes",
        lists=lists,
        name=f"{spec.name}-{digest[:12]}" if wishes or extras else digest[:12],
        wheel=name_wheel(),
        native=native if launch.native else ":",
        wait=f"{_MAKE_WAIT_S:g}",
    )


def _render_start(profile: Profile) -> str:
    tools = (profile.detach, *profile.daemon.tools)
    chosen = list(dict.fromkeys(tool for tool in tools if tool in _WAYS))
    ways = "\n".join(_WAYS[tool] for tool in chosen)
    return fill("start.sh", ways=ways, tools=" ".join(chosen))


def _list_steps(spec: JobSpec, profile: Profile, job_dir: str, relaunch: bool) -> tuple[Step, ...]:
    """Return what submit does, as a person would type it."""
    host = profile.launch.host
    ssh = ("ssh", host) if host else ()
    at = f"{host}:{job_dir}" if host else job_dir
    excludes = tuple(f"--exclude={pattern}" for pattern in spec.launch.exclude)
    rsync = ("rsync", "-a", "-s", "--partial-dir=.rsync-partial", *excludes)
    target = f"{profile.overrides.CRED_FILE}-{spec.name}"
    names = ", ".join(spec.launch.secrets)
    secrets = Step("send secrets", (*ssh, f"cat > {target}"), f"values of {names}")
    survive = Step("survive a reboot", (*ssh, "sh", f"{job_dir}/launch/relaunch.sh"))
    return (
        Step("look at the box", (*ssh, "python3", "-", "probe"), "box.py"),
        Step("send the project", (*rsync, f"{spec.launch.project}/", f"{at}/project/")),
        Step(
            "mend scripts",
            (*ssh, "python3", f"{job_dir}/launch/results.py", "repair", f"{job_dir}/project"),
        ),
        Step("find or make the environment", (*ssh, "sh", f"{job_dir}/launch/setup.sh")),
        *([secrets] if spec.launch.secrets else []),
        *([survive] if relaunch else []),
        Step("start it, detached", (*ssh, "sh", f"{job_dir}/launch/start.sh")),
    )


def _check(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what is amiss with a job on one box."""
    alone, url = len(profile.launch.hosts) < 2, spec.checkpoint.url
    return [
        *warning(
            not alone and profile.shared_fs is False and not url,
            "the boxes share no disk: only an elastic job keeps checkpoints, one box for all",
            "other scripts: checkpoint.url on a disk that all see, or elastic.train",
        ),
        *note(
            spec.nodes > 1 and alone,
            f"nodes = {spec.nodes} are emulated on the one box",
            "launch.hosts names several",
        ),
        *error(
            spec.launch.secrets and not profile.overrides.CRED_FILE,
            "launch.secrets: this profile keeps no secrets in files (CRED_FILE is empty)",
            "overrides.CRED_FILE, on the box's own disk",
            "U34",
        ),
        *note(
            profile.interruption.relaunch == "none",
            "a reboot of the box ends the job; the same launch resumes it",
            'interruption.relaunch = "cron" or "systemd" has the box do it',
            "GEN6",
        ),
    ]
