"""What is wrong with a job and a profile in a notebook, before a session is spent on it."""

from collections.abc import Mapping

from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.traps.findings import error, note, warning

KAGGLE_SOURCE_MAX = 1_000_000
"""Bytes of a pushed notebook, as it is commonly reported; Kaggle's own documents do not say."""


def check_notebook(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    """Return what a person should know of this job in a session."""
    section, ceiling_s = profile.notebook, profile.interruption.session_max_s
    stop_before_s, startup_s = section.stop_before_s, section.startup_s
    url, durable = spec.checkpoint.url, profile.overrides.DURABLE_DIR
    return [
        *error(
            ceiling_s <= stop_before_s + startup_s,
            f"a session of {ceiling_s:g} s leaves no time to train",
            f"interruption.session_max_s above {stop_before_s} s (stop_before_s) + "
            f"{startup_s} s (startup_s)",
            "NB5",
        ),
        *error(
            url and "://" not in url and not url.startswith(f"{durable}/"),
            f"checkpoint.url = {url} is gone with the session",
            "leave it out: checkpoints go to DURABLE_DIR; or name an object store",
            "NB4",
        ),
        *note(spec.num_nodes > 1, f"{spec.num_nodes} nodes are emulated on the one machine"),
        *(_check_kaggle(spec, profile, files) if section.service == "kaggle" else ()),
    ]


def _check_kaggle(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    section = profile.notebook
    size = max(len(content.encode()) for content in files.values())
    return [
        *error(
            not section.owner,
            "a notebook's id on Kaggle begins with your user name",
            'notebook.owner in a profile of your own, with base = "kaggle"',
        ),
        *error(
            section.accelerator == "NvidiaTeslaP100",
            "the default image's torch has no kernels for a P100",
            'notebook.accelerator = "NvidiaTeslaT4"',
            "NB3",
        ),
        *error(
            spec.launch.secrets,
            "a push takes the notebook's secrets away, so that cells find none",
            "leave launch.secrets out, and data sets private",
            "U34",
        ),
        *warning(
            size > KAGGLE_SOURCE_MAX,
            f"the notebook has {size / 1e6:.2f} MB, and Kaggle may take no more "
            f"than {KAGGLE_SOURCE_MAX / 1e6:g}",
            "launch.exclude; data in notebook.dataset_sources",
        ),
    ]
