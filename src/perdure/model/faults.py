"""The faults that can be injected, by name: what each does, for help and for checks."""

FAULTS = {
    "crash": "SIGKILL",
    "exit": "leaves with exit code `code`",
    "oom": "runs out of memory (`mb`)",
    "stop": "SIGSTOP; SIGCONT after `for_s`",
    "spin": "the training thread burns CPU without progress",
    "sleep": "the training thread sleeps",
    "gil": "native code holds the interpreter's lock",
    "slow": "every step begins `s` later",
    "slow-forward": "`ms` more (or `factor` times a step) in every forward pass",
    "slow-backward": "the same in every backward pass",
    "slow-data": "the same in every batch that a DataLoader delivers",
    "memory": "takes `mb` and keeps writing to it",
    "wrong-op": "one collective that the others do not call",
    "wrong-size": "one collective of another size",
    "slow-link": "`mbit` Mbit/s from this node to node `to`, or to all",
    "drop-link": "loses all that this node sends to node `to`, or to all",
    "link-down": "takes the node's interface down",
    "heal": "ends what can be ended",
}
NETWORK_FAULTS = ("slow-link", "drop-link", "link-down")
"""Only in a laboratory whose nodes have network namespaces of their own (docs/lab.md)."""
