"""The clouds' own command lines, played: `aws`, `gcloud` or `az`, as this file is called.

They take what they are documented to take, and answer in the words of the real ones. What they
know is in the JSON file that PLAYED_CLOUD names: whether the machine `box-1` was `stopped`, how
many questions `lag` until it is gone, whether account, region and zone are `set_up`, and what was
`asked`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

CLOUDS = {"aws-spot": "aws", "gcp-spot": "gcloud", "azure-spot": "az"}
"""Profile -> its command."""

Answer = tuple[int, str]
"""Exit code, and what is said: an error where that is not 0."""


class Cloud:
    """A command line in `folder`/bin, and what it knows."""

    def __init__(self, folder: Path, profile: str) -> None:
        self.profile = profile
        self.state = folder / "cloud.json"
        self.know(stopped=False, lag=3, set_up=True, asked=[])
        path = folder / "bin" / CLOUDS[profile]
        path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
        path.chmod(0o755)

    def know(self, **facts: Any) -> None:
        known = json.loads(self.state.read_text()) if self.state.exists() else {}
        self.state.write_text(json.dumps(known | facts))

    def ask(self, fact: str) -> Any:
        return json.loads(self.state.read_text())[fact]


class Words:
    """A command's arguments, of which each has to be known."""

    def __init__(self, words: list[str]) -> None:
        self.left = words

    def take(self, flag: str) -> str:
        """Return the value of `flag`, which has to be there."""
        at = self.left.index(flag)
        value = self.left[at + 1]
        del self.left[at : at + 2]
        return value

    def end(self, *expected: str) -> None:
        """Refuse what was not taken."""
        if tuple(self.left) != expected:
            leave((2, f"unrecognized arguments: {self.left}"))


def leave(answer: Answer) -> NoReturn:
    code, said = answer
    print(said, file=sys.stderr if code else sys.stdout)
    sys.exit(code)


class Said:
    """What one command says of a machine."""

    def __init__(self, stop: bool, id_: str, unknown: Answer, late: Answer, *states: str) -> None:
        self.stop, self.id, self.unknown, self.late = stop, id_, unknown, late
        self.states = states
        """Before the stop, on its way, and gone; without the last it is not known then."""


def read_aws(words: Words) -> Said:
    words.take("--output")
    id_, stop = words.take("--instance-ids"), words.left[1] == "terminate-instances"
    operation = "TerminateInstances" if stop else "DescribeInstances"
    if not stop:
        assert words.take("--query") == "Reservations[].Instances[].State.Name"
    words.end("ec2", "terminate-instances" if stop else "describe-instances")
    begin = "An error occurred ({}) when calling the " + operation + " operation: "
    unknown = begin.format("InvalidInstanceID.NotFound") + f"The instance ID '{id_}' does not exist"
    late = begin.format("RequestLimitExceeded") + "Request limit exceeded."
    return Said(stop, id_, (254, unknown), (254, late), "running", "shutting-down", "terminated")


def read_gcloud(words: Words) -> Said:
    id_, stop = words.left.pop(), words.left[2] == "delete"
    verb, flag = ("delete", "--quiet") if stop else ("describe", "--format=value(status)")
    words.end("compute", "instances", verb, flag)
    begin = f"ERROR: (gcloud.compute.instances.{verb}) Could not fetch resource:\n"
    unknown = f"{begin} - The resource 'projects/p/zones/z/instances/{id_}' was not found"
    late = f"{begin} - The resource 'projects/p/zones/z' was not found"
    return Said(stop, id_, (1, unknown), (1, late), "RUNNING", "STOPPING")


def read_az(words: Words) -> Said:
    words.take("--output")
    id_, stop = words.take("--name"), words.left[1] == "deallocate"
    if not stop:
        query = "instanceView.statuses[?starts_with(code, 'PowerState/')].code"
        assert words.take("--query") == query
    words.end("vm", "deallocate" if stop else "get-instance-view")
    unknown = (
        f"ERROR: (ResourceNotFound) The Resource 'Microsoft.Compute/virtualMachines/{id_}' under "
        "resource group 'g' was not found. For more details please go to "
        "https://aka.ms/ARMResourceNotFoundFix\nCode: ResourceNotFound"
    )
    late = "ERROR: (ResourceGroupNotFound) Resource group 'g' could not be found."
    states = [f"PowerState/{word}" for word in ("running", "deallocating", "deallocated")]
    return Said(stop, id_, (3, unknown), (3, late), *states)


READ = {"aws": read_aws, "gcloud": read_gcloud, "az": read_az}
NOT_SET_UP = {
    "aws": (253, 'aws: [ERROR]: You must specify a region. You can also run "aws configure".'),
    "gcloud": (1, "ERROR: Underspecified resource [box-1]. Specify the [--zone] flag."),
    "az": (2, "ERROR: the following arguments are required: --resource-group/-g"),
}


def decide(known: dict[str, Any], name: str, words: list[str]) -> Answer:
    """Return the answer to a command; `known` is what it knows from then on."""
    known["asked"].append([name, *words])
    if not known["set_up"]:
        return NOT_SET_UP[name]
    said = READ[name](Words(list(words)))
    if said.id != "box-1":
        return said.unknown
    if said.stop:
        known["stopped"] = True
        return (0, "")
    if not known["stopped"]:
        return (0, said.states[0])
    known["lag"] -= 1
    if known["lag"] == 1:
        return said.late
    if known["lag"] > 0:
        return (0, said.states[1])
    forgotten = known["lag"] < -50 or len(said.states) < 3
    return said.unknown if forgotten else (0, said.states[2])


def main() -> None:
    state = Path(os.environ["PLAYED_CLOUD"])
    known = json.loads(state.read_text())
    answer = decide(known, Path(sys.argv[0]).name, sys.argv[1:])
    state.write_text(json.dumps(known))
    leave(answer)


if __name__ == "__main__":
    main()
