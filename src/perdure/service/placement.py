"""Where the parts of a job run when `--nodes K` does not mean K times this machine's loopback.

A placement gives each node an address and a command that carries its agent there, such as
`ip netns exec lab-{node}`; keeper, store and ranks are the agent's descendants, so they are there
as well. The fault laboratory uses it with network namespaces; other machines are the same thing
with another command. Its NATS server speaks TLS there (with a certificate made at its start,
unless one is given), but collectives are not encrypted, so an address that the internet could
reach is refused.
"""

import ipaddress
import json
import os
from collections.abc import Mapping

import msgspec

from perdure.files.regular import read_file
from perdure.launch.ssh.box import list_interfaces
from perdure.model.errors import ConfigError, ProtocolError
from perdure.model.job import JobSpec
from perdure.model.records import decode_record

LOOPBACK = "127.0.0.1"
CLOSED = "an address of a lab or of a private network, such as 10.77.0.1"


class Invited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An invitation, without what would let anybody in."""

    id: str
    digest: str
    uses: int = 1


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The document behind `--placement FILE` (JSON)."""

    bind: str = LOOPBACK
    """Where nats-server listens; the nodes reach it there."""
    addresses: tuple[str, ...] = ()
    """Of node 0, 1, ...: where other nodes reach it; none means loopback for all."""
    command: tuple[str, ...] = ()
    """Put before the command line of an agent; `{node}` becomes its number."""
    interface: str = ""
    """Name of the interface that carries collectives on every node (GLOO_SOCKET_IFNAME)."""
    door: str = ""
    """File, beside this one, in which the server's port, certificate and `joiner`'s password are
    kept over the job's runs (`service/access/credentials.py`); empty: each run has its own."""
    invited: tuple[Invited, ...] = ()
    """Invitations that the controller is told of at the start; who has one has made it himself."""
    network_faults: bool = False
    """Whether `perdure inject` may change queues and interfaces inside the nodes: only where
    each of them has a network namespace of its own."""

    def prefix(self, node: int) -> list[str]:
        """Return what stands before the command line of `node`'s agent."""
        return [word.replace("{node}", str(node)) for word in self.command]

    def environment(self, node: int) -> dict[str, str]:
        """Return what the agent of `node`, and so its ranks, find in their environment."""
        env = {}
        if self.addresses:
            env["PERDURE_NODE_ADDRESS"] = self.addresses[node]
        if self.interface:
            env |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        if self.network_faults:
            lab = {"interface": self.interface, "addresses": self.addresses}
            env["PERDURE_LAB"] = json.dumps(lab)
        return env


HERE = Placement()
"""Every node is this machine's loopback."""


def load_placement(path: str, nodes: int) -> Placement:
    """Return the placement in the file `path`, for `nodes` nodes.

    Raises:
        ConfigError: it cannot be read, has too few addresses, or opens the job to strangers.
    """
    try:
        placement: Placement = decode_record(read_file(path, follow=True), Placement)
    except OSError as error:
        raise ConfigError(f"--placement {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ProtocolError) as error:
        raise ConfigError(f"--placement {path}: {error}", hint="see docs/lab.md") from error
    if placement.addresses and len(placement.addresses) < nodes:
        raise ConfigError(
            f"--placement {path}: {len(placement.addresses)} addresses for {nodes} nodes"
        )
    for address in (placement.bind, *placement.addresses):
        if not is_closed(address):
            raise ConfigError(
                f"--placement {path}: strangers may reach {address}; collectives have no TLS",
                hint=CLOSED,
            )
    if placement.door:
        door = os.path.join(os.path.dirname(os.path.abspath(path)), placement.door)
        placement = msgspec.structs.replace(placement, door=door)
    if placement.network_faults and not (placement.interface and placement.addresses):
        raise ConfigError(f"--placement {path}: network_faults need interface and addresses")
    return placement


def read_own_address(env: Mapping[str, str]) -> str:
    """Return where other nodes reach this one, from the environment of its agent."""
    return env.get("PERDURE_NODE_ADDRESS") or LOOPBACK


def choose_gloo_interface(spec: JobSpec, env: Mapping[str, str]) -> str:
    """Return the interface of this node's address; empty if you have named one, or none has it.

    Left alone, gloo takes the address of the host's own name. On Debian and Ubuntu that is
    127.0.1.1, at which no other node is. Elsewhere, strangers may reach a job of one machine there.
    """
    if "GLOO_SOCKET_IFNAME" in {**env, **spec.env}:
        return ""
    address = read_own_address(env)
    if address.startswith("127."):
        address = LOOPBACK
    return next((name for name, own in list_interfaces() if own == address), "")


def is_closed(address: str) -> bool:
    """Return whether `address` is one of a private network: collectives have no TLS."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (ip.is_global or ip.is_multicast or ip.is_unspecified)
