"""Where platforms say that they take a machine away: metadata services, taints, and a file.

Each source returns all that is announced at the moment, a level, so that an agent that is
replaced, and an announcement that is taken back, need nothing of their own.
"""

from collections.abc import Mapping
from pathlib import Path

from perdure.adapters.host import read_text
from perdure.adapters.notices.clouds import AwsNotices, AzureNotices, GcpMaintenance, GcpPreempted
from perdure.adapters.notices.file import FileNotices
from perdure.adapters.notices.http import Source
from perdure.adapters.notices.kubernetes import KubernetesNode, is_pod
from perdure.model.job import PreemptionConfig

DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Azure's chassis asset tag, the same on all of its machines."""


def detect_platform(dmi: Path = DMI) -> str:
    """Return `aws`, `gcp` or `azure` by what the firmware says; empty elsewhere.

    Nothing is asked over the network, so that a machine of no cloud pays nothing.
    """

    def read(name: str) -> str:
        return read_text(dmi / name).strip()

    if "Amazon EC2" in (read("sys_vendor"), read("bios_vendor")):
        return "aws"
    if read("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if read("chassis_asset_tag") == _AZURE_TAG else ""


def open_sources(
    config: PreemptionConfig, node: int, env: Mapping[str, str], dmi: Path = DMI
) -> list[Source]:
    """Return the sources that `config` asks for, for the agent of `node`.

    Raises:
        ConfigError: a variable of the environment has no plain http URL of a metadata service.
    """
    platform = detect_platform(dmi) if config.platform == "auto" else config.platform
    sources: list[Source] = []
    if platform == "aws":
        sources.append(AwsNotices(env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")))
    elif platform == "azure":
        sources.append(AzureNotices())
    elif platform == "gcp":
        host = env.get("GCE_METADATA_HOST", "")
        url = f"http://{host}" if host else ""
        sources += [GcpPreempted(url), GcpMaintenance(url)]
    if config.platform == "auto" and is_pod(env):
        sources.append(KubernetesNode(env))
    if config.file:
        sources.append(FileNotices(config.file.replace("{node}", str(node))))
    return sources


__all__ = [
    "AwsNotices",
    "AzureNotices",
    "FileNotices",
    "GcpMaintenance",
    "GcpPreempted",
    "KubernetesNode",
    "Source",
    "detect_platform",
    "open_sources",
]
