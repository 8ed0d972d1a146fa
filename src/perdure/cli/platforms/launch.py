"""`perdure launch`: one job file, any platform."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.platforms.image import (
    Compiles,
    Torch,
    Wheel,
    WriteImage,
    write_image,
)
from perdure.cli.platforms.profiles import Host
from perdure.cli.speech.say import Json, answer, note, print_json
from perdure.dash.terminal import print_exact
from perdure.model.errors import ConfigError, SafetyError
from perdure.model.platforms.kubernetes import IMAGE_BASE
from perdure.service.jobfolders import is_alive, paths_of

if TYPE_CHECKING:
    from perdure.launch.platforms import Here, Platform
    from perdure.model.job import JobSpec
    from perdure.model.platforms.launching import Finding, LaunchRecord, Plan
    from perdure.model.platforms.profile import Profile

Kustomize = Annotated[
    Path | None,
    typer.Option(
        "--kustomize",
        metavar="DIR",
        help="With --dry-run: write a kustomize base: the job, its account with its rights, its "
        "volume.",
    ),
]


def launch(
    job_file: Annotated[
        str | None, typer.Argument(metavar="JOB.TOML", help="Without --write-image: the job file.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PROFILE", help="Where: see perdure profiles.")
    ] = None,
    host: Host = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Render, check the place, say what would be done.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="With --dry-run: write the files that it would submit there; - prints them.",
        ),
    ] = None,
    kustomize: Kustomize = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--attach", help="Without --dry-run: follow it to its end, also where it runs already."
        ),
    ] = False,
    image: WriteImage = None,
    torch: Torch = None,
    base: Annotated[
        str,
        typer.Option(
            "--base", metavar="IMAGE", help="With --write-image: image on which it is built."
        ),
    ] = IMAGE_BASE,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag", metavar="NAME", help="With --write-image: its name. [default: perdure:VERSION]"
        ),
    ] = None,
    wheel: Wheel = None,
    compiles: Compiles = True,
    as_json: Json = False,
) -> int:
    """Check a job for a platform, submit it and leave it running.

    The job outlives this machine: controller and agent run beside it. With --dry-run and --out (or
    --kustomize) the place is not asked, and nothing is touched.
    """
    if image is not None:
        return write_image(image, torch, base, tag, wheel, compiles, as_json)
    if job_file is None or on is None:
        raise ConfigError(
            "a launch needs a job file and --on PROFILE", hint="perdure profiles lists the profiles"
        )
    from perdure.cli.platforms.profiles import choose_profile, here

    place = here()
    spec = make_launch_spec(job_file, place.home)
    plan = make_plan(spec, choose_profile(on, host, place.home).profile)
    if out is not None or kustomize is not None:
        return _write_plan(plan, out, kustomize, as_json)
    return _launch(spec, plan, place, dry_run=dry_run, follow=follow, as_json=as_json)


def _write_plan(plan: "Plan", out: Path | None, kustomize: Path | None, as_json: bool) -> int:
    """Write or print what a launch would submit: scripts, a manifest, or a notebook."""
    from perdure.launch.platforms import write_files

    files, folder = list_files(plan), None if str(out) == "-" else out
    if kustomize is not None and out is not None:
        raise ConfigError("--kustomize and --out write different files", hint="one of them")
    if kustomize is not None:
        from perdure.launch.kubernetes.kustomize import make_base  # Nobody else has need of it.

        files, folder = make_base(plan), kustomize
    if as_json:
        print_json({**describe_plan(plan), "files": files})
    elif folder is not None:
        write_files(files, folder, mode=0o700)  # The job's [env] is in the files.
        for name in files:
            print(folder / name)
    else:
        for name, content in files.items():
            print(f"# ==> {name} <==")
            print_exact(content, end="" if content.endswith("\n") else "\n")
    for finding in plan.findings:
        note(render_finding(finding))
    return 2 if any(f.level == "error" for f in plan.findings) else 0


def _launch(
    spec: "JobSpec", plan: "Plan", place: "Here", *, dry_run: bool, follow: bool, as_json: bool
) -> int:
    import shlex

    from perdure.cli.platforms.profiles import render_danger
    from perdure.cli.speech.bar import Bar
    from perdure.service.jobfiles import wait_for_start

    stop = _hear_stop() if follow else []
    if follow and _runs_there(plan, place):
        return _follow(plan.job, stop)
    if not as_json:
        print(render_danger(plan.profile), file=sys.stderr)
    plan = check_launch(spec, plan, place)
    if dry_run:
        lines = [
            f"would {step.what}: {shlex.join(step.command)}"
            + (f" < {step.stdin}" if step.stdin else "")
            for part in (plan, *plan.others)
            for step in part.steps
        ]
        answer({"dry_run": True, **describe_plan(plan)}, "\n".join(lines), as_json=as_json)
        return 0
    if stop:
        return 128 + signal.SIGTERM
    with Bar(as_json=as_json) as bar:
        bar.say("launch", None, plan.profile.platform)
        record = submit(spec, plan, place)
    if plan.kind == "local":
        wait_for_start(paths_of(place.home, plan.job), int(record.id))
    how = "waits for you on" if plan.settings.get("by_hand") else "runs on"
    text = "; ".join((f"job {plan.job} {how} {plan.profile.platform}", *plan.attach))
    answer(
        {"job": plan.job, "id": record.id, "attach": plan.attach, "record": record},
        text,
        as_json=as_json,
    )
    return _follow(plan.job, stop) if follow else 0


def check_launch(spec: "JobSpec", plan: "Plan", place: "Here") -> "Plan":
    """Return the plan for what the place itself says, and say what is amiss.

    Raises:
        ConfigError: the job's name is taken.
        SafetyError: something is amiss that a launch would not survive.
        PlatformError: the place cannot be reached.
    """
    from perdure.launch.platforms import load_platform

    check_name(plan, place.home)
    plan = check_place(spec, plan, load_platform(plan.kind), place)
    for finding in plan.findings:
        note(render_finding(finding))
    errors = [finding for finding in plan.findings if finding.level == "error"]
    if errors:
        raise SafetyError(f"not launched: {errors[0].text}", hint=errors[0].hint)
    return plan


def submit(spec: "JobSpec", plan: "Plan", place: "Here") -> "LaunchRecord":
    """Submit a plan that was checked; return what is remembered of it."""
    from perdure.launch.platforms import load_platform
    from perdure.launch.records import read_record, write_record

    done = load_platform(plan.kind).submit(plan, place)
    record = _keep_account(spec, done, read_record(place.home, plan.job))
    write_record(place.home, record)
    return record


def _keep_account(
    spec: "JobSpec", record: "LaunchRecord", before: "LaunchRecord | None"
) -> "LaunchRecord":
    """Return a record with what reminders need; a launch that goes on is billed from the first."""
    import msgspec

    since_s = record.launched_s
    if before and not before.torn_down_s and _place(before.profile) == _place(record.profile):
        since_s = before.billed_since_s or before.launched_s
    return msgspec.structs.replace(record, billed_since_s=since_s, alerts=spec.alerts)


def _runs_there(plan: "Plan", place: "Here") -> bool:
    """Return whether the job was launched to this very place before, and waits or runs."""
    from perdure.launch.platforms import load_platform
    from perdure.launch.records import read_record

    record = read_record(place.home, plan.job)
    if record is None or record.torn_down_s or _place(record.profile) != _place(plan.profile):
        return False
    if plan.kind == "local":
        return is_alive(paths_of(place.home, plan.job))
    return not load_platform(plan.kind).query_state(record, place).over


class _Asked(Exception):
    """SIGTERM: whoever waits for the job wants it stopped, not left alone."""


def _hear_stop() -> list[int]:
    """Return a list that fills with SIGTERM: a launch that is under way is gone through with.

    Were it broken off, its job might run, and nobody here would know of it.
    """
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    return heard


def _follow(job: str, heard: list[int]) -> int:
    """Follow a job to its end and return its exit code; SIGTERM stops the job itself."""
    import subprocess

    from perdure.cli.platforms.remote import attach

    def ask(number: int, frame: object) -> None:
        raise _Asked

    try:
        signal.signal(signal.SIGTERM, ask)
        if heard:
            raise _Asked
        return attach(job)
    except _Asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.run([sys.executable, "-P", "-m", "perdure", "stop", job], check=False)
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_plan(spec: "JobSpec", profile: "Profile") -> "Plan":
    """Return the plan of a job on a profile.

    Raises:
        ConfigError: the two do not go together.
    """
    from perdure.launch.platforms import load_platform

    return load_platform(profile.kind).render(spec, profile)


def make_launch_spec(job_file: str, home: str) -> "JobSpec":
    """Return the job of a job file, its project as an absolute path, its script looked at.

    Raises:
        ConfigError: a field is wrong or too large, the script is not there or does not compile.
    """
    import msgspec

    from perdure.cli.running.jobspec import (
        check_environment,
        check_module,
        check_script,
        choose_name,
        read_job_file,
        validate,
    )

    document = read_job_file(job_file)
    document.setdefault("script", "")
    spec = validate(document, job_file)
    if not spec.script:
        raise ConfigError(f"{job_file}: no script to run", hint='script = "train.py"')
    project = os.path.join(os.path.dirname(os.path.abspath(job_file)), spec.launch.project)
    project = os.path.normpath(os.path.expanduser(project))
    if not os.path.isdir(project):
        raise ConfigError(f"{job_file}: launch.project: no folder {project}")
    spec = msgspec.structs.replace(
        spec, launch=msgspec.structs.replace(spec.launch, project=project)
    )
    looked_at = msgspec.structs.replace(spec, cwd=os.path.join(project, spec.cwd))
    if spec.module:
        check_module(looked_at)
    elif not spec.no_python:
        check_script(looked_at)
    check_environment(spec, {})
    return spec if "name" in document else choose_name(spec, home)


def check_name(plan: "Plan", home: str) -> None:
    """Refuse a name under which a job runs here, or may still cost money at another place.

    Raises:
        ConfigError: it is taken.
    """
    from perdure.launch.records import read_remote

    job, hint = plan.job, f"perdure status {plan.job}, or another `name`"
    if is_alive(paths_of(home, job)):
        raise ConfigError(f"job `{job}` is running", hint=hint)
    before = read_remote(home, job)
    if before is None or before.torn_down_s or _place(before.profile) == _place(plan.profile):
        return
    if plan.kind == "local" or not before.profile.ends_by_itself:
        raise ConfigError(
            f"job `{job}` was launched on {before.box}, and is not torn down", hint=hint
        )


def _place(profile: "Profile") -> tuple[str, str]:
    return profile.platform, profile.launch.host


def check_place(spec: "JobSpec", plan: "Plan", platform: "Platform", place: "Here") -> "Plan":
    """Return the plan for what the place itself says: values measured, findings added.

    Raises:
        PlatformError: it cannot be reached.
    """
    import msgspec

    from perdure.launch.catalog import Resolved, overlay
    from perdure.model.platforms.profile import list_unmeasured

    values, findings = platform.check(plan, place)
    wanted = set(list_unmeasured(plan.profile))
    measured = {key: value for key, value in values.items() if key in wanted}
    for key, value in measured.items():
        place.tell(f"measured: {key} = {value if value != '' else 'none'}")
    profile = overlay(Resolved(plan.profile, {}), measured, "measured").profile
    plan = platform.render(spec, profile)
    return msgspec.structs.replace(plan, findings=(*plan.findings, *findings))


def list_files(plan: "Plan") -> dict[str, str]:
    """Return a plan's files; those of further boxes that differ, below the box's name."""
    files = dict(plan.files)
    for other in plan.others:
        own = {n: text for n, text in other.files.items() if text != plan.files.get(n)}
        files |= {f"{other.profile.launch.host}/{name}": text for name, text in own.items()}
    return files


def describe_plan(plan: "Plan") -> dict[str, Any]:
    """Return a plan as `--json` shows it."""
    import msgspec

    return {
        "job": plan.job,
        "kind": plan.kind,
        "platform": plan.profile.platform,
        "files": list_files(plan),
        "steps": [msgspec.to_builtins(s) for p in (plan, *plan.others) for s in p.steps],
        "findings": msgspec.to_builtins(plan.findings),
        "attach": plan.attach,
    }


def render_finding(finding: "Finding") -> str:
    """Return a finding as one line, and one for its hint."""
    trap = f" [{finding.trap}]" if finding.trap else ""
    hint = f"\n         {finding.hint}" if finding.hint else ""
    return f"{finding.level}{trap}: {finding.text}{hint}"
