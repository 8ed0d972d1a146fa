"""The sbatch script of a job: text only, the same for the same job and profile."""

import shlex
import sys

from perdure.model.job import JobSpec
from perdure.model.profile import Profile
from perdure.model.slurm import SlurmSection

SIGNAL = "USR1"
"""The warning. With TERM, Slurm's log says CANCELLED, and a shell without a trap dies at once."""

_BODY = """\
set -u
{hooks}\
export PERDURE_HOME={home}
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


def render_script(spec: JobSpec, profile: Profile) -> str:
    """Return the script."""
    section = profile.slurm
    place = find_place(spec, profile)
    modules = "".join(f"module load {shlex.quote(name)}\n" for name in section.modules)
    hook = f"{profile.overrides.PROXY_HOOK}\n" if profile.overrides.PROXY_HOOK else ""
    python = f"{section.container} {quote(find_python(profile))}".strip()
    body = _BODY.format(
        hooks=modules + hook,
        home=quote(find_home(profile)),
        place=quote(place),
        signal=SIGNAL,
        cwd=quote(spec.launch.project),
        command=f"{python} -P -m perdure.launch.slurm.batch",
    )
    head = "".join(f"#SBATCH {line}\n" for line in list_directives(spec, section))
    output = f"#SBATCH --output={spec.launch.project}/slurm-{spec.name}-%j.out\n"
    return f"#!/bin/bash\n{head}{output}{body}"


def list_directives(spec: JobSpec, section: SlurmSection) -> list[str]:
    """Return the options of sbatch, without `#SBATCH`."""
    lines = [
        f"--job-name={spec.name}",
        f"--nodes={spec.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={find_cpus(spec, section)}",
        f"--time={section.time_limit}",
        f"--signal=B:{SIGNAL}@{section.warn_s}",
        "--requeue",
        "--open-mode=append",
    ]
    named = ("partition", "account", "qos", "constraint", "mem", "array")
    lines += [f"--{name}={value}" for name in named if (value := getattr(section, name))]
    if gres := find_gres(spec, section):
        lines.append(f"--gres={gres}")
    if section.dependency:
        # Without the second, a job whose dependency failed waits for ever.
        lines += [f"--dependency={section.dependency}", "--kill-on-invalid-dep=yes"]
    return [*lines, *section.extra]


def find_python(profile: Profile) -> str:
    """Return the Python of the job: the profile's, or else the one that renders."""
    named = profile.launch.python
    return sys.executable if named == "python3" else named


def find_cpus(spec: JobSpec, section: SlurmSection) -> int:
    """Return the cores of a node."""
    return section.cpus_per_task or max(1, spec.nproc)


def find_gres(spec: JobSpec, section: SlurmSection) -> str:
    """Return the devices of a node, as `--gres` takes them."""
    return section.gres or (f"gpu:{spec.launch.gpus}" if spec.launch.gpus else "")


def find_home(profile: Profile) -> str:
    """Return PERDURE_HOME of the job, variables unexpanded."""
    return f"{profile.overrides.DURABLE_DIR}/state"


def find_place(spec: JobSpec, profile: Profile) -> str:
    """Return the folder of the job's own files, variables unexpanded."""
    return f"{profile.overrides.DURABLE_DIR}/launched/{spec.name}"


def quote(path: str) -> str:
    """Return a path for the shell, in which `$NAME` is still expanded."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'
