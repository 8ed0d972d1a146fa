"""What every platform's launcher is to the commands: five functions in one module.

`render` is pure: the same job and profile give the same plan, and nothing is touched. `check` looks
at the place itself and changes nothing. Only `submit` acts. What a launched job is asked later goes
through `run`, which carries one perdure command line to where the job is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import BoxState, Finding, LaunchRecord, Plan
from perdure.model.platforms.profile import Kind, Profile

MODULES: dict[Kind, str] = {
    "local": "perdure.launch.here",
    "ssh": "perdure.launch.ssh",
    "slurm": "perdure.launch.slurm",
    "notebook": "perdure.launch.notebook",
    "kubernetes": "perdure.launch.kubernetes",
}
"""Kind of a profile -> module that is a `Platform`."""


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, as a launcher meets it."""

    home: str
    """PERDURE_HOME of this machine, absolute."""
    environ: Mapping[str, str]
    """Where the values of secrets are."""
    tell: Callable[[str], None]
    """Says one line of progress to the person who waits."""


class Platform(Protocol):
    """The module of one kind of platform."""

    def render(self, spec: JobSpec, profile: Profile) -> Plan:
        """Return what would be submitted. `spec.launch.project` is an absolute path.

        Raises:
            ConfigError: this job cannot be rendered for this platform at all.
        """

    def check(self, plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
        """Return values of the profile measured at the place, by dotted key, and what is amiss.

        Raises:
            PlatformError: the place cannot be reached.
        """

    def submit(self, plan: Plan, here: Here) -> LaunchRecord:
        """Start the job, detached; return what is to be remembered.

        Raises:
            ConfigError: a job of this name runs there.
            PlatformError: a step failed; the message says which.
        """

    def find_state(self, record: LaunchRecord, here: Here) -> BoxState:
        """Return how the job is, by what the place itself says.

        Raises:
            PlatformError: nobody answered, which says nothing about the job.
        """

    def run(self, record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
        """Run one perdure command line where the job is; return its exit code.

        Raises:
            PlatformError: nobody answered, which says nothing about the job.
        """


def find_platform(kind: Kind) -> Platform:
    """Return the launcher of a kind of platform.

    Raises:
        ConfigError: perdure renders nothing for it.
    """
    if kind not in MODULES:
        known = ", ".join(sorted(MODULES))
        raise ConfigError(f"no launcher for platforms of kind {kind}", hint=f"there is {known}")
    return cast(Platform, import_module(MODULES[kind]))
