"""A job for a box with nothing but SSH, as files that a person can read. Nothing is touched.

On the box, below $DATA_DIR/JOB: `project` is what was sent, `launch` holds these files and what the
supervisor writes. Job state and checkpoints are under $DURABLE_DIR/state.
"""

import os
import shlex
from pathlib import Path

import msgspec

from perdure.launch.lint import check_plan, locate_in_project, render_job
from perdure.launch.wheel import find_digest, name_wheel
from perdure.model.job import JobSpec
from perdure.model.launching import Finding, Plan, Step
from perdure.model.profile import HOST_DEPENDENT, Profile

_HERE = Path(__file__).resolve().parent

_WAYS = {
    "tmux": """\
if command -v tmux >/dev/null; then
  socket="$JOB_DIR/launch/tmux" # Of its own: the one under /tmp may be cleaned away.
  [ ${#socket} -lt 100 ] || socket="/tmp/perdure-tmux-$(printf %s "$JOB_DIR" | cksum | tr -d ' ')"
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
    """Return the plan of `spec` on the box of `profile`."""
    job_dir = f"{profile.overrides.DATA_DIR}/{spec.name}"
    files = {
        "job.json": render_job(place_job(spec)),
        "env.sh": render_environment(spec, profile),
        "setup.sh": _render_setup(spec, profile),
        "start.sh": _render_start(spec, profile),
        "run.sh": fill("run.sh"),
        "settings.json": _render_settings(spec),
        "box.py": (_HERE / "box.py").read_text(encoding="utf-8"),
        "results.py": (_HERE / "results.py").read_text(encoding="utf-8"),
    }
    relaunch = profile.interruption.relaunch != "none"
    if relaunch:
        script = f"{profile.interruption.relaunch}.sh"
        files["relaunch.sh"] = fill(script, job=spec.name)
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


def place_job(spec: JobSpec) -> JobSpec:
    """Return the job as it is on another machine: paths in the project, relative to it.

    Raises:
        ConfigError: one lies outside the project.
    """
    cwd = locate_in_project(spec, spec.cwd, "cwd")
    script = spec.script
    if not spec.module and not spec.no_python:
        inside = locate_in_project(spec, os.path.join(spec.cwd, script), "script")
        script = os.path.relpath(inside, cwd)
    launch = msgspec.structs.replace(spec.launch, project=".")
    return msgspec.structs.replace(spec, cwd=cwd, script=script, launch=launch)


def render_environment(spec: JobSpec, profile: Profile) -> str:
    """Return the shell file that says where things are on the box."""
    overrides = profile.overrides
    lines = [
        "# Where things are on this box: read by this job's scripts and by perdure's commands."
    ]
    if overrides.PROXY_HOOK:
        lines.append(overrides.PROXY_HOOK)
    credentials = f"{overrides.CRED_FILE}-{spec.name}" if overrides.CRED_FILE else ""
    values = {
        "DATA_DIR": overrides.DATA_DIR,
        "DURABLE_DIR": overrides.DURABLE_DIR,
        "HF_HOME": overrides.HF_HOME,
        "CRED_FILE": credentials,
        "JOB_DIR": f"$DATA_DIR/{spec.name}",
        "PERDURE_HOME": "$DURABLE_DIR/state",
    }
    if profile.mirror not in ("", HOST_DEPENDENT):
        values["HF_ENDPOINT"] = profile.mirror
    lines += [f'export {name}="{_expand(value)}"' for name, value in values.items()]
    lines.append('export PERDURE_PYTHON="$(cat "$JOB_DIR/launch/python" 2>/dev/null)"')
    return "\n".join(lines) + "\n"


def _expand(place: str) -> str:
    """Return a place for double quotes, where the shell expands no tilde."""
    return "$HOME" + place[1:] if place == "~" or place.startswith("~/") else place


def _render_settings(spec: JobSpec) -> str:
    """Return what the supervisor runs; variables are those of env.sh."""
    command = ["$PERDURE_PYTHON", "-P", "-m", "perdure", "run", "--config"]
    settings = {
        "command": [*command, "$JOB_DIR/launch/job.json"],
        "cwd": "$JOB_DIR/project",
        "gpus": spec.launch.gpus or spec.nproc * spec.nodes,
    }
    return msgspec.json.format(msgspec.json.encode(settings)).decode() + "\n"


def _render_setup(spec: JobSpec, profile: Profile) -> str:
    launch, digest = profile.launch, find_digest()
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
        python=_expand(launch.python),
        wishes=" ".join(wishes),
        plain="no" if wishes else "yes",
        lists=lists,
        name=f"{spec.name}-{digest[:12]}" if wishes else digest[:12],
        wheel=name_wheel(),
        native=native if launch.native else ":",
    )


def _render_start(spec: JobSpec, profile: Profile) -> str:
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
    steps = [
        Step("look at the box", (*ssh, "python3", "-", "probe"), "box.py"),
        Step("send the project", (*rsync, f"{spec.launch.project}/", f"{at}/project/")),
        Step("mend scripts", (*ssh, "python3", f"{job_dir}/launch/results.py", "repair",
                              f"{job_dir}/project")),
        Step("find or make the environment", (*ssh, "sh", f"{job_dir}/launch/setup.sh")),
    ]  # fmt: skip
    if spec.launch.secrets:
        target = f"{profile.overrides.CRED_FILE}-{spec.name}"
        names = ", ".join(spec.launch.secrets)
        steps.append(Step("send secrets", (*ssh, f"cat > {target}"), f"values of {names}"))
    if relaunch:
        steps.append(Step("survive a reboot", (*ssh, "sh", f"{job_dir}/launch/relaunch.sh")))
    steps.append(Step("start it, detached", (*ssh, "sh", f"{job_dir}/launch/start.sh")))
    return tuple(steps)


def _check(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what is amiss with a job on one box."""
    found = []
    if spec.nodes > 1:
        text = f"nodes = {spec.nodes} are emulated on the one box"
        found.append(Finding("note", text, "nodes on several boxes need a placement"))
    if spec.launch.secrets and not profile.overrides.CRED_FILE:
        text = "launch.secrets: this profile keeps no secrets in files (CRED_FILE is empty)"
        found.append(Finding("error", text, "overrides.CRED_FILE, on the box's own disk", "U34"))
    if profile.interruption.relaunch == "none":
        found.append(
            Finding("note", "a reboot of the box ends the job; the same launch resumes it",
                    'interruption.relaunch = "cron" or "systemd" has the box do it', "GEN6")
        )  # fmt: skip
    return found
