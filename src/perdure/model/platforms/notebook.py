"""What a profile asks of a notebook platform."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]*$")]
Source = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+$")]


class NotebookSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a session is, and when the job leaves it."""

    service: Literal["colab", "kaggle"] = "colab"
    """Whose notebook it is."""
    owner: Word = ""
    """Kaggle's user name, which is a part of the notebook's id."""
    accelerator: Word = "T4"
    """As the service names it, such as `T4` or `NvidiaTeslaT4`; empty: none, on the CPU."""
    stop_before_s: Annotated[int, Meta(ge=1)] = 600
    """How long before the session's ceiling the job is told to save and to leave."""
    startup_s: Annotated[int, Meta(ge=0)] = 300
    """From the start of a session to its first step, as the linter counts."""
    every_steps: Annotated[int, Meta(ge=1)] = 100
    """Steps between checkpoints, where the job does not say: no signal comes before the end."""
    sessions_max: Annotated[int, Meta(ge=1)] = 1000
    """So many sessions go on with the job; then it is given up."""
    internet_url: str = "https://github.com"
    """Asked for before pip is, to tell a session without internet at once."""
    dataset_sources: tuple[Source, ...] = ()
    """Kaggle's datasets, `owner/name`, that lie under /kaggle/input."""
