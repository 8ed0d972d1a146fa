"""A box over ssh before it is given back: who else uses it, held still, without our secrets."""

from collections.abc import Iterator
from contextlib import contextmanager

from perdure.launch.channel import Channel
from perdure.launch.platforms import Teardown
from perdure.launch.results.gate import is_destroyed
from perdure.launch.ssh.ask import in_job
from perdure.launch.wheel import read_program
from perdure.model.platforms.launching import LaunchRecord

_CLEAN = """\
rc=0; if [ -f launch/relaunch.sh ]; then sh launch/relaunch.sh off || rc=1; fi; \
rm -rf "$CRED_FILE" launch/credentials || rc=1; exit $rc"""


class SshTeardown(Teardown):
    """A machine that is destroyed, or a login node on which only secrets are to be removed."""

    def list_users(self, box: LaunchRecord) -> list[str]:
        """Return the processes and logins of others on a machine that the stop verb takes.

        Where no host is named the machine is this one, and whoever asks can see for themselves.
        """
        if not (is_destroyed(box) and box.profile.launch.host):
            return []
        return Channel(box.profile.launch).query(
            "python3 - others -", dict[str, list[str]], stdin=read_program("box.py").encode()
        )["others"]

    @contextmanager
    def hold(self, box: LaunchRecord) -> Iterator[str]:
        """Hold what a start of any job there needs."""
        if not is_destroyed(box):
            yield ""
            return
        source, folder = read_program("box.py").encode(), f"{box.place}/launch"
        with Channel(box.profile.launch).hold(source, "hold", folder) as told:
            yield told["why"]

    def clean(self, box: LaunchRecord) -> str:
        """Take secrets and what starts the job again off the box; it may be about to be deleted."""
        channel = Channel(box.profile.launch)
        # Where nothing was sent, it lies in the project here.
        sent = f'test -e "{box.place}/launch/env.sh" || exit 0; '
        done = channel.ask(sent + in_job(box.place, _CLEAN))
        channel.disconnect()
        return f"{channel.name}: {done.err}" if done.code else ""
