"""A plan carried out on a box: sent, compared, mended, given an environment, started, left."""

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import msgspec

from perdure.failpoints import failpoint
from perdure.launch.channel import Channel
from perdure.launch.exchange import last_line, run_bounded
from perdure.launch.platforms import Here, read_secrets, write_files
from perdure.launch.records import write_record
from perdure.launch.ssh.ask import ask_state, in_job
from perdure.launch.transfer import PARTIAL, push
from perdure.launch.wheel import write_wheel
from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import BoxState, LaunchRecord, Plan

_SETUP_S = 3600.0
_START_S = 30.0
_STARTING = "launch/.starting"
"""As old as the start that is waited for."""
_LATE = 75
"""Exit code of a script that has waited for so long."""


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Start the job of `plan` on its box; return what is to be remembered.

    Every step may be done twice: what broke off is begun again by the same command.

    Raises:
        ConfigError: a secret is missing, or a job of this name runs there.
        PlatformError: a step failed.
    """
    prepare(plan, here)
    record = make_launch_record(plan)
    write_record(here.home, record)  # Before it costs: whatever breaks now, it is not forgotten.
    failpoint("launch/recorded")
    state = start(record, here)
    failpoint("launch/started")
    wait_endpoint(plan, record)
    return msgspec.structs.replace(record, boot_id=state.boot_id)


def prepare(plan: Plan, here: Here) -> None:
    """Send what the job needs to its box, and make its environment.

    Raises:
        ConfigError: a secret is missing.
        PlatformError: a step failed.
    """
    channel = Channel(plan.profile.launch)
    secrets = read_secrets(plan.settings["secrets"], here)
    folder = _make_folder(channel, plan)
    _at_once(
        lambda: _send_files(channel, plan, folder, here),
        lambda: _send_project(channel, plan, folder, here),
    )
    _at_once(
        lambda: _check_project(channel, plan, folder),
        lambda: _set_up(channel, plan, folder, here),
    )
    failpoint("launch/sent")
    _mend_project(channel, folder, here)
    if secrets:
        _send_secrets(channel, plan, secrets)
        here.tell(f"sent {len(secrets)} secrets over standard input")
    if plan.settings["relaunch"]:
        must(channel, plan, f"sh {shlex.quote(folder)}/launch/relaunch.sh")


def _at_once(*steps: Callable[[], None]) -> None:
    """Do steps that need not wait for one another: most of each is the way to the box and back."""
    with ThreadPoolExecutor(len(steps)) as pool:
        for step in [pool.submit(step) for step in steps]:
            step.result()


def make_launch_record(plan: Plan) -> LaunchRecord:
    """Return what is to be remembered of a box that was prepared.

    Raises:
        PlatformError: it was not, or does not answer.
    """
    folder, home, python, durable = must(
        Channel(plan.profile.launch),
        plan,
        r'printf "%s\n" "$JOB_DIR" "$PERDURE_HOME" "$PERDURE_PYTHON" "$DURABLE_DIR"',
    ).split("\n")
    return LaunchRecord(
        job=plan.job,
        profile=plan.profile,
        place=folder,
        home=home,
        python=python,
        launched_s=time.time(),
        roots=list_roots(plan, folder, home, durable),
        project=plan.settings["project"],
    )


def list_roots(plan: Plan, folder: str, home: str, durable: str) -> dict[str, str]:
    """Return what is to be pulled once the job has ended: label -> absolute folder on the box."""
    jobs = plan.settings.get("jobs", {"job": plan.job})
    roots = {label: f"{home}/jobs/{name}" for label, name in jobs.items()}
    roots["launch"] = f"{folder}/launch"
    roots |= {f"outputs/{name}": f"{folder}/project/{name}" for name in plan.settings["outputs"]}
    url = plan.settings["checkpoints"].replace("$DURABLE_DIR", durable)
    if url and "://" not in url:
        roots["checkpoints"] = str(PurePosixPath(folder, "project", plan.settings["cwd"], url))
    return roots


def _make_folder(channel: Channel, plan: Plan) -> str:
    """Return the absolute path of the job's folder on the box, made where it was missing."""
    return channel.must(
        f'mkdir -p "{plan.place}/launch" "{plan.place}/project" && cd "{plan.place}" && pwd',
        hint="overrides.DATA_DIR",
    )


def _send_files(channel: Channel, plan: Plan, folder: str, here: Here) -> None:
    with tempfile.TemporaryDirectory(prefix="perdure-") as scratch:
        write_files(plan.files, Path(scratch))
        write_wheel(Path(scratch))
        push(channel, Path(scratch), f"{folder}/launch", tell=here.tell, shared=True)


def _send_project(channel: Channel, plan: Plan, folder: str, here: Here) -> None:
    source, exclude = Path(plan.settings["project"]), plan.settings["exclude"]
    here.tell(f"sending {source} to {channel.name}:{folder}/project")
    push(channel, source, f"{folder}/project", exclude=exclude, tell=here.tell)


def _set_up(channel: Channel, plan: Plan, folder: str, here: Here) -> None:
    here.tell("looking for Python, or making an environment")
    done = must(channel, plan, f"sh {shlex.quote(folder)}/launch/setup.sh", _SETUP_S)
    for line in done.splitlines():
        here.tell(line)


def _check_project(channel: Channel, plan: Plan, folder: str) -> None:
    """See that what arrived is what was sent.

    Raises:
        PlatformError: it is not.
    """
    source, exclude = Path(plan.settings["project"]), plan.settings["exclude"]
    differing = _compare(channel, source, f"{folder}/project", exclude)
    if differing:
        raise PlatformError(
            f"{len(differing)} files differ after they were sent, {differing[0]} among them",
            hint="is the project being edited? launch again",
        )


def _mend_project(channel: Channel, folder: str, here: Here) -> None:
    """Mend line ends and execute bits of its scripts there."""
    told = channel.query(
        f"python3 {shlex.quote(folder)}/launch/results.py repair {shlex.quote(folder)}/project",
        dict[str, list[str]],
    )
    for what, names in told.items():
        if names:
            here.tell(f"mended {what.replace('_', ' ')} of {', '.join(names)}")


def _compare(channel: Channel, source: Path, target: str, exclude: tuple[str, ...]) -> list[str]:
    """Return the files whose contents differ, by their hashes."""
    at = channel.locate(target)
    excludes = [f"--exclude={pattern}" for pattern in (*exclude, PARTIAL)]
    shell = channel.carry_rsync()  # Names and hashes are little.
    command = ["rsync", "-acn", "-s", "--out-format=%n", *excludes, *shell]
    try:
        done = run_bounded([*command, f"{source}/", at], name=channel.name, timeout_s=_SETUP_S)
    except subprocess.TimeoutExpired:
        raise PlatformError(f"cannot compare with {at}: no end in {_SETUP_S:.0f} s") from None
    if done.returncode:
        raise PlatformError(
            f"cannot compare with {at}: {done.stderr.decode(errors='replace').strip()}"
        )
    return [line for line in os.fsdecode(done.stdout).splitlines() if not line.endswith("/")]


def _send_secrets(channel: Channel, plan: Plan, secrets: dict[str, str]) -> None:
    """Write the secrets to CRED_FILE, on the box's own disk; they are in no argument and no log."""
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    # Removed first: one that is there already would keep its mode, whatever the umask.
    script = in_job(
        plan.place,
        'umask 077; mkdir -p "$(dirname "$CRED_FILE")"; rm -f "$CRED_FILE"; cat > "$CRED_FILE"',
    )
    done = channel.ask(script, stdin="".join(lines).encode())
    if done.code:
        raise PlatformError(f"{channel.name}: cannot write secrets: {done.err}")


def must(
    channel: Channel, plan: Plan, script: str, timeout_s: float = 120.0, stdin: bytes = b""
) -> str:
    """Return the output of a step that can be repeated and must succeed."""
    inside, hint = in_job(plan.place, script), f"the step was: {script}"
    return channel.must(inside, hint=hint, timeout_s=timeout_s, stdin=stdin)


def start(record: LaunchRecord, here: Here) -> BoxState:
    """Start a box's part of the job, and wait until its supervisor has written down that it runs.

    It was found not to run before. Who starts it a second time, because the first answer was lost,
    starts nothing, and finds that it runs.

    Raises:
        PlatformError: it does not start.
    """
    channel = Channel(record.profile.launch)
    script = in_job(record.place, f"touch {_STARTING} && sh launch/start.sh >&2")
    done = channel.ask(f"{script} && {_wait_newer('launch/start.json')}", timeout_s=2 * _START_S)
    if done.code not in (0, _LATE):
        last = last_line(done.err, "it said nothing")
        raise PlatformError(f"{channel.name}: {last}", hint="the step was: launch/start.sh")
    state = ask_state(channel, record)
    if done.code == _LATE and state.over:
        last = _read_last_words(channel, record)
        raise PlatformError(f"{channel.name}: the job did not start: {last}")
    if state.state == "ended" and state.code:
        raise PlatformError(f"{channel.name}: {state.reason}", hint=f"perdure logs {record.job}")
    here.tell(f"{channel.name}: {state.reason}")
    return state


def wait_endpoint(plan: Plan, record: LaunchRecord) -> None:
    """Wait until commands find the job, but not for ever.

    Raises:
        PlatformError: it has ended before.
    """
    channel, endpoint = Channel(plan.profile.launch), f"$PERDURE_HOME/jobs/{plan.job}/endpoint.json"
    waited = f'{_wait_newer(endpoint, "launch/exit.json")}; test "{endpoint}" -nt {_STARTING}'
    if channel.ask(in_job(record.place, waited), timeout_s=2 * _START_S).code == 0:
        return
    state = ask_state(channel, record)
    if state.over:
        raise PlatformError(
            f"{channel.name}: {state.reason}: {_read_last_words(channel, record)}",
            hint="launch it again",
        )


def _read_last_words(channel: Channel, record: LaunchRecord) -> str:
    """Return the last line of what was started there, errors of perdure's own first."""
    lines = channel.ask(
        f"tail -n 5 {shlex.quote(record.place)}/launch/run.out"
    ).out.strip().splitlines() or ["it wrote nothing"]
    mark = "perdure: error: "
    return next((line.removeprefix(mark) for line in lines if line.startswith(mark)), lines[-1])


def _wait_newer(*paths: str) -> str:
    """Return the script that waits until one of `paths` is of this start, but not for ever."""
    looks = round(_START_S / 0.1)
    found = " || ".join(f'[ "{path}" -nt {_STARTING} ]' for path in paths)
    return (
        f"i=0; until {found}; do [ $i -lt {looks} ] || exit {_LATE}; i=$((i + 1)); sleep 0.1; done"
    )
