"""The box looked at before anything is sent: what it has, who holds it, what would go wrong."""

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from perdure.launch.channel import Channel
from perdure.launch.platforms import Here
from perdure.launch.ssh.programs import ASK, read_program
from perdure.model.errors import ConfigError
from perdure.model.platforms.launching import Finding, Plan
from perdure.model.platforms.profile import LaunchSection, Profile
from perdure.model.platforms.supported import TESTED_TORCH, read_version

_SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.sshfs",
    "9p",
    "glusterfs",
)
_PLAIN = {"LC_ALL": "C"}
RUNPOD_PROXY = "ssh.runpod.io"
LIVING = ("running", "orphaned")
_FREE_MIN = 2 << 30
_INODES_MIN = 20_000
MIRROR_PROBE = "huggingface.co:443"


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return what was measured, by key of the profile, and what is amiss.

    Of several boxes the first one's values stand; each one's findings carry its name.

    Raises:
        PlatformError: a box cannot be reached, or has no Python at all.
    """
    plans = (plan, *plan.others)
    with ThreadPoolExecutor(len(plans)) as pool:
        told = list(pool.map(probe, plans))
    measured, found = _check_box(plan, told[0], here)
    if not plan.others:
        return measured, tuple(found)
    looked_at = [(measured, found)]
    looked_at += [_check_box(*pair, here) for pair in zip(plan.others, told[1:], strict=True)]
    measured["shared_fs"] = all(values["shared_fs"] for values, _ in looked_at)
    named = [
        msgspec.structs.replace(finding, text=f"{each.profile.launch.host}: {finding.text}")
        for each, (_, found) in zip(plans, looked_at, strict=True)
        for finding in found
    ]
    return measured, (*named, *_check_states(plans, [each["state"] for each in told]))


def _check_states(plans: Sequence[Plan], states: list[dict[str, Any]]) -> list[Finding]:
    """Return what it means for a launch which boxes run the job already.

    Where the first does, those that it has lost are brought back.
    """
    runs = [state["state"] in LIVING for state in states]
    names = [plan.profile.launch.host for plan in plans]
    if all(runs):
        hint = f"perdure attach {plans[0].job}, perdure stop {plans[0].job}, or another name"
        return [Finding("error", f"job {plans[0].job} runs there already", hint)]
    if runs[0]:
        lost = ", ".join(name for name, lives in zip(names, runs, strict=True) if not lives)
        return [Finding("note", f"the job runs; it is joined by {lost}")]
    return []


def _check_box(
    plan: Plan, told: dict[str, Any], here: Here
) -> tuple[dict[str, Any], list[Finding]]:
    """Return what was measured on one box, and what is amiss there."""
    durable = told["places"]["DURABLE_DIR"]
    measured = {
        "shared_fs": durable["type"] in _SHARED,
        "inode_cap": durable["inodes"] or "none",
        "host_driver_cuda_max": told["cuda_max"] or "none",
        "local_nvme": told["nvme"] or "none",
    }
    if told["reached"] is not None:
        measured["mirror"] = ""
    found = [
        *_check_host(plan),
        *check_banner(plan),
        *check_places(told),
        *check_room(told["places"]["DATA_DIR"], measure_project(plan)),
        *check_tools(plan, told),
        *_check_gpus(plan, told),
        *check_secrets(plan, told, here),
    ]
    if told["reached"] is False:
        found.append(
            Finding("warning", f"{MIRROR_PROBE} cannot be reached from the box",
                    'mirror = "https://..." where data or weights come from there')
        )  # fmt: skip
    state = told["state"]["state"]
    if state in LIVING and len(plan.profile.launch.hosts) < 2:
        found.append(
            Finding("error", f"job {plan.job} runs there already: {told['state']['reason']}",
                    f"perdure attach {plan.job}, perdure stop {plan.job}, or another name")
        )  # fmt: skip
    elif state == "rebooted":
        found.append(Finding("note", "the box was rebooted; the job goes on from its checkpoint"))
    return measured, found


def _check_host(plan: Plan) -> list[Finding]:
    """Return that no box is named: then this machine is taken for it."""
    if plan.profile.launch.host:
        return []
    text = "no box is named: the job is sent to this machine itself"
    return [Finding("warning", text, "--host ALIAS names one; --on local sends nothing")]


def check_banner(plan: Plan) -> list[Finding]:
    """Return whether shells there print something at every login."""
    banner = Channel(plan.profile.launch).ask("true").banner
    if not banner:
        return []
    text = f"a shell of the box prints at every login: {banner.splitlines()[0]}"
    return [Finding("error", text, "rsync breaks on it: ~/.bashrc has to be silent without a tty")]


def probe(plan: Plan) -> dict[str, Any]:
    """Return what `box.py probe` tells of the box."""
    profile = plan.profile
    refuse_proxy(profile.launch)
    overrides = profile.overrides
    places = {"DATA_DIR": overrides.DATA_DIR, "DURABLE_DIR": overrides.DURABLE_DIR}
    if overrides.CRED_FILE:
        places["CRED_FILE"] = overrides.CRED_FILE
    wanted = {
        "places": places,
        "python": profile.launch.python,
        "mirror": MIRROR_PROBE if profile.mirror == "host-dependent" else "",
        "folder": plan.place,
    }
    argument = shlex.quote(msgspec.json.encode(wanted).decode())
    names = f"DATA_DIR={_quote(overrides.DATA_DIR)}; export DATA_DIR; "
    script = f"{ASK}{names}exec python3 - probe {argument}"
    answer: dict[str, Any] = Channel(profile.launch).query(
        script, dict[str, Any], stdin=read_program("box.py").encode(), timeout_s=120
    )
    return answer


def refuse_proxy(section: LaunchSection) -> None:
    """Refuse RunPod's proxy, which gives a terminal and neither commands nor files.

    Its documentation ("Connect to a Pod with SSH", read 2026-11-22) says so of basic SSH.

    Raises:
        ConfigError: the box's name, or the address that ssh's configuration has for it, is that.
    """
    host = section.host
    if not host:
        return
    names = [host]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        config = ["-F", os.path.expanduser(section.ssh_config)] if section.ssh_config else []
        done = subprocess.run(["ssh", *config, "-G", host], capture_output=True, text=True,
                              timeout=10, stdin=subprocess.DEVNULL)  # fmt: skip
        names += [line.split()[1] for line in done.stdout.splitlines()
                  if line.startswith("hostname ")]  # fmt: skip
    if any(name.rpartition("@")[2].lower() == RUNPOD_PROXY for name in names):
        raise ConfigError(
            f"{host} is RunPod's proxy ({RUNPOD_PROXY}): it carries a terminal, but no files and "
            "no commands",
            hint="SSH over exposed TCP: the pod's public IP and port of 22, in ~/.ssh/config",
        )


def _quote(place: str) -> str:
    """Return a place for the shell: its variables are expanded there, nothing else is."""
    return '"' + ("$HOME" + place[1:] if place.startswith("~") else place) + '"'


def check_places(told: dict[str, Any]) -> list[Finding]:
    """Return whether there is room where the job writes, that lasts."""
    found = []
    for name in ("DATA_DIR", "DURABLE_DIR"):
        place = told["places"][name]
        where = f"{name} {place['path']}"
        if not place["writable"]:
            found.append(Finding("error", f"{where} cannot be written", f"overrides.{name}"))
        if place["type"] in ("tmpfs", "ramfs"):
            text = f"{where} is in memory ({place['type']}): gone with a reboot"
            found.append(Finding("error", text, f"overrides.{name} on a disk", "GEN6"))
        if place["free_bytes"] < _FREE_MIN:
            text = f"{where}: {place['free_bytes'] / 1e9:.1f} GB free"
            found.append(Finding("warning", text, "a full disk breaks checkpoints", "U6"))
        if place["inodes"] and place["free_inodes"] < _INODES_MIN:
            text = f"{where}: {place['free_inodes']} files fit"
            found.append(Finding("warning", text, "inodes end before bytes do", "U7"))
    return list(dict.fromkeys(found))


def measure_project(plan: Plan) -> tuple[int, int]:
    """Return bytes and files of what is to be sent; none where rsync cannot say."""
    project = plan.settings["project"]
    excludes = [f"--exclude={pattern}" for pattern in plan.settings["exclude"]]
    command = ["rsync", "-an", "--stats", "--no-human-readable", *excludes, f"{project}/"]
    with tempfile.TemporaryDirectory(prefix="perdure-") as empty:
        try:
            done = subprocess.run(
                [*command, f"{empty}/"], capture_output=True, text=True, env=os.environ | _PLAIN
            )
        except FileNotFoundError:
            return 0, 0
    return _read_count("Total file size", done.stdout), _read_count("Number of files", done.stdout)


def _read_count(name: str, text: str) -> int:
    match = re.search(rf"{name}: ([\d,]+)", text)
    return int(match[1].replace(",", "")) if match else 0


def check_room(place: dict[str, Any], project: tuple[int, int]) -> list[Finding]:
    """Return that the project does not fit where it is to be sent."""
    size, files = project
    where = f"DATA_DIR {place['path']}"
    hint = "launch.exclude leaves out what is not needed there; or another DATA_DIR"
    if size > place["free_bytes"]:
        text = f"the project's {size / 1e9:.1f} GB do not fit on {where}"
        return [Finding("error", f"{text}: {place['free_bytes'] / 1e9:.1f} GB free", hint, "U6")]
    if place["inodes"] and files > place["free_inodes"]:
        text = f"the project's {files} files do not fit on {where}"
        return [Finding("error", f"{text}: {place['free_inodes']} more may be there", hint, "U7")]
    return []


def check_tools(plan: Plan, told: dict[str, Any]) -> list[Finding]:
    """Return whether the programs are there that a launch needs."""
    found = []
    tools = told["tools"]
    launch = plan.profile.launch
    if "rsync" not in tools and plan.profile.launch.host:
        found.append(Finding("error", "the box has no rsync", "apt-get install rsync", "GEN3"))
    if "tmux" not in tools and plan.profile.detach == "tmux":
        word = "note" if "setsid" in tools else "error"
        hint = "setsid takes its place" if word == "note" else "install tmux"
        found.append(Finding("note" if word == "note" else "error", "the box has no tmux", hint))
    if told["lingers"] is False and plan.profile.detach != "sbatch":
        found.append(
            Finding("warning", "this user does not linger: systemd may end what is left at logout",
                    "loginctl enable-linger", "GEN2")
        )  # fmt: skip
    relaunch = plan.profile.interruption.relaunch
    if plan.settings.get("relaunch") and relaunch not in told["starters"]:
        text = f"no {relaunch} runs on the box that would start the job after a reboot"
        instead = told["starters"][0] if told["starters"] else "none"
        found.append(Finding("error", text, f'interruption.relaunch = "{instead}"', "GEN6"))
    if not told["python"]:
        text = f"there is no {launch.python} on the box"
        found.append(Finding("error", text, "launch.python names another"))
    elif tuple(map(int, told["python_version"].split(".")[:2])) < (3, 11):
        text = f"{launch.python} on the box is {told['python_version']}; perdure needs 3.11"
        found.append(Finding("error", text, "launch.python names another"))
    else:
        found += check_torch(plan.profile, told["torch"])
    return found


def check_torch(profile: Profile, version: str) -> list[Finding]:
    """Return what a job would meet that runs with the torch of `launch.python`; empty: none."""
    launch = profile.launch
    if not version and launch.environment == "use":
        text = f"{launch.python} on the box has no torch"
        return [Finding("error", text, 'launch.environment = "create", or another python')]
    brought = launch.environment != "use" and any(
        re.match(r"torch\b(?!-)", package) for package in launch.packages
    )
    if not version or brought or read_version(version) == read_version(TESTED_TORCH):
        return []
    text = f"torch {version} of {launch.python} on the box; perdure is tested with {TESTED_TORCH}"
    if read_version(version) < read_version(TESTED_TORCH):
        hint = f"pip install 'torch>={TESTED_TORCH}' there, or another launch.python"
        return [Finding("error", f"{text}, and needs it or newer", hint)]
    return [Finding("warning", text, "the recorder falls back where this torch differs")]


def _check_gpus(plan: Plan, told: dict[str, Any]) -> list[Finding]:
    gpus = told["gpus"]
    if not gpus:
        return []
    settings = msgspec.json.decode(plan.files["settings.json"])
    wanted = settings["gpus"]
    busy = [gpu for gpu in gpus if gpu["pids"]]
    holders = "; ".join(f"GPU {g['index']}: process {', '.join(g['pids'])}" for g in busy)
    if len(gpus) - len(busy) < wanted:
        text = f"{wanted} GPUs are wanted, {len(gpus) - len(busy)} of {len(gpus)} are free"
        return [Finding("error", text, holders or "launch.gpus", "GEN7")]
    return [Finding("warning", "GPUs are held by others", holders, "GEN7")] if busy else []


def check_secrets(plan: Plan, told: dict[str, Any], here: Here) -> list[Finding]:
    """Return whether the secrets are here, and safe there."""
    names = plan.settings.get("secrets", ())
    found = [
        Finding("error", f"the secret {name} is not set here", f"export {name}=...", "U34")
        for name in names
        if not here.environ.get(name)
    ]
    place = told["places"].get("CRED_FILE")
    if names and place and place["type"] in _SHARED:
        text = f"CRED_FILE {place['path']} is on a shared file system ({place['type']})"
        hint = "overrides.CRED_FILE on the box's own disk"
        found.append(Finding("error", text, hint, "U34"))
    return found
