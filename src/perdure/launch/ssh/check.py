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

from perdure.launch.channel import Channel, list_config
from perdure.launch.platforms import Here, expand_tilde
from perdure.launch.wheel import ASK, read_program
from perdure.model.errors import ConfigError
from perdure.model.platforms.box import (
    NETWORK_KINDS,
    TESTED_TORCHES,
    TORCH_END,
    TORCH_MIN,
    read_version,
)
from perdure.model.platforms.launching import Finding, Plan
from perdure.model.platforms.profile import LaunchSection, Profile
from perdure.traps.findings import error, finding, note, warning

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
    others = zip(plan.others, told[1:], strict=True)
    looked_at = [(measured, found), *(_check_box(*pair, here) for pair in others)]
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
    lost = [plan.profile.launch.host for plan, lives in zip(plans, runs, strict=True) if not lives]
    return [
        *error(not lost, f"job {plans[0].job} runs there already", _describe_others(plans[0].job)),
        *note(lost and runs[0], f"the job runs; it is joined by {', '.join(lost)}"),
    ]


def _describe_others(job: str) -> str:
    return f"perdure attach {job}, perdure stop {job}, or another name"


def _check_box(
    plan: Plan, told: dict[str, Any], here: Here
) -> tuple[dict[str, Any], list[Finding]]:
    """Return what was measured on one box, and what is amiss there."""
    durable = told["places"]["DURABLE_DIR"]
    measured = {
        "shared_fs": durable["type"] in NETWORK_KINDS,
        "inode_cap": durable["inodes"] or "none",
        "host_driver_cuda_max": told["cuda_max"] or "none",
        "local_nvme": told["nvme"] or "none",
    }
    if told["reached"] is not None:
        measured["mirror"] = ""
    launch, state = plan.profile.launch, told["state"]["state"]
    return measured, [
        *warning(
            not launch.host,
            "no box is named: the job is sent to this machine itself",
            "--host ALIAS names one; --on local sends nothing",
        ),
        *check_banner(plan),
        *check_places(told),
        *check_free_space(told["places"]["DATA_DIR"], measure_project(plan)),
        *check_tools(plan, told),
        *_check_gpus(plan, told),
        *check_secrets(plan, told, here),
        *warning(
            told["reached"] is False,
            f"{MIRROR_PROBE} cannot be reached from the box",
            'mirror = "https://..." where data or weights come from there',
        ),
        *error(
            state in LIVING and len(launch.hosts) < 2,
            f"job {plan.job} runs there already: {told['state']['reason']}",
            _describe_others(plan.job),
        ),
        *note(state == "rebooted", "the box was rebooted; the job goes on from its checkpoint"),
    ]


def check_banner(plan: Plan) -> list[Finding]:
    """Return whether shells there print something at every login."""
    said = Channel(plan.profile.launch).ask("true").banner.splitlines()
    text = f"a shell of the box prints at every login: {next(iter(said), '')}"
    return error(said, text, "rsync breaks on it: ~/.bashrc has to be silent without a tty")


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
    names = f'DATA_DIR="{expand_tilde(overrides.DATA_DIR)}"; export DATA_DIR; '
    return Channel(profile.launch).query(
        f"{ASK}{names}exec python3 - probe {argument}",
        dict[str, Any],
        stdin=read_program("box.py").encode(),
        timeout_s=120,
    )


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
        done = subprocess.run(["ssh", *list_config(section), "-G", host], capture_output=True,
                              text=True, timeout=10, stdin=subprocess.DEVNULL)  # fmt: skip
        names += [
            line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")
        ]
    if any(name.rpartition("@")[2].lower() == RUNPOD_PROXY for name in names):
        raise ConfigError(
            f"{host} is RunPod's proxy ({RUNPOD_PROXY}): it carries a terminal, but no files and "
            "no commands",
            hint="SSH over exposed TCP: the pod's public IP and port of 22, in ~/.ssh/config",
        )


def check_places(told: dict[str, Any]) -> list[Finding]:
    """Return whether there is room where the job writes, that lasts."""
    found: list[Finding] = []
    for name in ("DATA_DIR", "DURABLE_DIR"):
        place = told["places"][name]
        where, key, files = f"{name} {place['path']}", f"overrides.{name}", place["free_inodes"]
        gone = f"{where} is in memory ({place['type']}): gone with a reboot"
        left = f"{where}: {place['free_bytes'] / 1e9:.1f} GB free"
        low, few = place["free_bytes"] < _FREE_MIN, place["inodes"] and files < _INODES_MIN
        found += [
            *error(not place["writable"], f"{where} cannot be written", key),
            *error(place["type"] in ("tmpfs", "ramfs"), gone, f"{key} on a disk", "GEN6"),
            *warning(low, left, "a full disk breaks checkpoints", "U6"),
            *warning(few, f"{where}: {files} files fit", "inodes end before bytes do", "U7"),
        ]
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


def check_free_space(place: dict[str, Any], project: tuple[int, int]) -> list[Finding]:
    """Return that the project does not fit where it is to be sent."""
    size, files = project
    free, files_free = place["free_bytes"], place["free_inodes"]
    where = f"do not fit on DATA_DIR {place['path']}"
    hint = "launch.exclude leaves out what is not needed there; or another DATA_DIR"
    text = f"the project's {size / 1e9:.1f} GB {where}: {free / 1e9:.1f} GB free"
    many = f"the project's {files} files {where}: {files_free} more may be there"
    fits = size <= free
    return [
        *error(not fits, text, hint, "U6"),
        *error(fits and place["inodes"] and files > files_free, many, hint, "U7"),
    ]


def check_tools(plan: Plan, told: dict[str, Any]) -> list[Finding]:
    """Return whether the programs are there that a launch needs."""
    tools, profile, starters = told["tools"], plan.profile, told["starters"]
    launch, relaunch = profile.launch, profile.interruption.relaunch
    detaches = "setsid" in tools
    version = tuple(map(int, (told["python_version"] or "0").split(".")[:2]))
    needed = f"{launch.python} on the box is {told['python_version']}; perdure needs 3.11"
    named = "launch.python names another"
    found = [
        *error(
            "rsync" not in tools and launch.host,
            "the box has no rsync",
            "apt-get install rsync",
            "GEN3",
        ),
        *finding(
            "note" if detaches else "error",
            "tmux" not in tools and profile.detach == "tmux",
            "the box has no tmux",
            "setsid takes its place" if detaches else "install tmux",
        ),
        *warning(
            told["lingers"] is False and profile.detach != "sbatch",
            "this user does not linger: systemd may end what is left at logout",
            "loginctl enable-linger",
            "GEN2",
        ),
        *error(
            plan.settings.get("relaunch") and relaunch not in starters,
            f"no {relaunch} runs on the box that would start the job after a reboot",
            f'interruption.relaunch = "{next(iter(starters), "none")}"',
            "GEN6",
        ),
    ]
    if not told["python"]:
        return found + error(True, f"there is no {launch.python} on the box", named)
    return found + (error(version < (3, 11), needed, named) or check_torch(profile, told["torch"]))


def check_torch(profile: Profile, version: str) -> list[Finding]:
    """Return what a job would meet that runs with the torch of `launch.python`; empty: none."""
    launch = profile.launch
    there = read_version(version)
    brought = launch.environment != "use" and any(
        re.match(r"torch\b(?!-)", package) for package in launch.packages
    )
    met = version and not brought
    text = f"torch {version} of {launch.python} on the box; perdure is tested with {TESTED_TORCHES}"
    return [
        *error(
            not version and launch.environment == "use",
            f"{launch.python} on the box has no torch",
            'launch.environment = "create", or another python',
        ),
        *error(
            met and there < TORCH_MIN,
            f"{text}, and needs one of them or newer",
            "pip install torch==2.13.0 there, or another launch.python",
        ),
        *warning(
            met and there >= TORCH_END, text, "the recorder falls back where this torch differs"
        ),
    ]


def _check_gpus(plan: Plan, told: dict[str, Any]) -> list[Finding]:
    gpus = told["gpus"]
    wanted = msgspec.json.decode(plan.files["settings.json"])["gpus"]
    busy = [gpu for gpu in gpus if gpu["pids"]]
    holders = "; ".join(f"GPU {g['index']}: process {', '.join(g['pids'])}" for g in busy)
    free = len(gpus) - len(busy)
    lacks = gpus and free < wanted
    text = f"{wanted} GPUs are wanted, {free} of {len(gpus)} are free"
    return [
        *error(lacks, text, holders or "launch.gpus", "GEN7"),
        *warning(busy and not lacks, "GPUs are held by others", holders, "GEN7"),
    ]


def check_secrets(plan: Plan, told: dict[str, Any], here: Here) -> list[Finding]:
    """Return whether the secrets are here, and safe there."""
    names = plan.settings.get("secrets", ())
    place = told["places"].get("CRED_FILE") or {"type": "", "path": ""}
    return [
        *(
            one
            for name in names
            for one in error(
                not here.environ.get(name),
                f"the secret {name} is not set here",
                f"export {name}=...",
                "U34",
            )
        ),
        *error(
            names and place["type"] in NETWORK_KINDS,
            f"CRED_FILE {place['path']} is on a shared file system ({place['type']})",
            "overrides.CRED_FILE on the box's own disk",
            "U34",
        ),
    ]
