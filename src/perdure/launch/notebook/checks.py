"""What is wrong with a job and a profile in a notebook, before a session is spent on it."""

from collections.abc import Mapping

from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile

KAGGLE_SOURCE_MAX = 1_000_000
"""Bytes of a pushed notebook, as it is commonly reported; Kaggle's own documents do not say."""


def check_notebook(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    """Return what a person should know of this job in a session."""
    section, ceiling_s = profile.notebook, profile.interruption.session_max_s
    found = []
    if ceiling_s <= section.stop_before_s + section.startup_s:
        found.append(
            Finding("error", f"a session of {ceiling_s:g} s leaves no time to train",
                    f"interruption.session_max_s above {section.stop_before_s} s (stop_before_s) + "
                    f"{section.startup_s} s (startup_s)", "NB5")
        )  # fmt: skip
    url = spec.checkpoint.url
    if url and "://" not in url and not url.startswith(profile.overrides.DURABLE_DIR + "/"):
        found.append(
            Finding("error", f"checkpoint.url = {url} is gone with the session",
                    "leave it out: checkpoints go to DURABLE_DIR; or name an object store", "NB4")
        )  # fmt: skip
    if spec.num_nodes > 1:
        found.append(Finding("note", f"{spec.num_nodes} nodes are emulated on the one machine"))
    return found + (_check_kaggle(spec, profile, files) if section.service == "kaggle" else [])


def _check_kaggle(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    section = profile.notebook
    found = []
    if not section.owner:
        found.append(
            Finding("error", "a notebook's id on Kaggle begins with your user name",
                    "notebook.owner in a profile of your own, with base = \"kaggle\"")
        )  # fmt: skip
    if section.accelerator == "NvidiaTeslaP100":
        found.append(
            Finding("error", "the default image's torch has no kernels for a P100",
                    'notebook.accelerator = "NvidiaTeslaT4"', "NB3")
        )  # fmt: skip
    if spec.launch.secrets:
        found.append(
            Finding("error", "a push takes the notebook's secrets away, so that cells find none",
                    "leave launch.secrets out, and data sets private", "U34")
        )  # fmt: skip
    size = max(len(content.encode()) for content in files.values())
    if size > KAGGLE_SOURCE_MAX:
        found.append(
            Finding("warning", f"the notebook has {size / 1e6:.2f} MB, and Kaggle may take no more "
                    f"than {KAGGLE_SOURCE_MAX / 1e6:g}",
                    "launch.exclude; data in notebook.dataset_sources")
        )  # fmt: skip
    return found
