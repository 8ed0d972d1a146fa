"""What operators ask for, and live configuration: keys that may change, and their changes."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from perdure.model.errors import ConfigError

RESUMED = ".resumed"
"""Added to the id of a pause or drain in `BoundaryReached`: the rank goes on."""
Verb = Literal[
    "checkpoint",
    "stop",
    "restart",
    "inject",
    "kill",
    "probe",
    "set",
    "pause",
    "resume",
    "drain",
    "cordon",
    "evict",
    "restore",
    "notify",
    "join",
    "invite",
    "revoke",
    "note",
    "preview",
]
"""What an operator may ask for. `preview` says what another would do, and is never journaled."""
PlaceVerb = Literal["drain", "cordon", "evict", "restore"]
"""Those that take a place out of the job or back into it: a node, device, rank or replica."""
NOTE_MAX = 500
"""Characters of a remark."""
LEAVE_DEADLINE_S = 600.0
"""Of a drain or an evict that names none."""
Value = bool | int | float | str | None
"""What a key may hold; None, of an optional one of perdure's: it is left to perdure."""
KEEPERS = ("checkpoint.every_s", "detect.", "policy.")
"""Keys (and their prefixes) that the controller and the detector apply; ranks take note only."""


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key, as the script (or perdure itself) declares it."""

    name: str
    type: Literal["bool", "int", "float", "str"]
    default: Value
    min: float | None = None
    max: float | None = None
    choices: tuple[Value, ...] = ()
    optional: bool = False
    """It may hold no value at all (`none`)."""
    note: str = ""
    """What it does, in one line."""
    owner: Literal["script", "perdure"] = "script"
    product: tuple[str, ...] = ()
    """Keys whose product has to stay what it is, this one among them."""

    @property
    def range(self) -> str:
        """Return what it may hold, in words."""
        if self.choices:
            return " | ".join(render_value(choice) for choice in self.choices)
        if self.min is not None and self.max is not None:
            return f"{self.min:g} to {self.max:g}"
        if self.min is not None:
            return f"from {self.min:g}"
        return f"up to {self.max:g}" if self.max is not None else ""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agreed change: the same values on every rank from the beginning of step `step`."""

    epoch: int
    """Numbers the changes of a job from 1; the epoch in force is part of every checkpoint."""
    step: int
    """The first step that runs with it."""
    values: dict[str, Any]
    before: dict[str, Any] = {}
    """What it replaced: what `--undo` sets again."""
    undoes: int = 0
    """The epoch that it takes back; 0 for none."""
    who: str = ""
    why: str = ""
    at_s: float = 0.0


class Steering(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a generation's ranks have to know of decisions that older generations have made."""

    changes: tuple[Change, ...] = ()
    """By epoch; those that a rank's checkpoint has seen count no more."""
    pause: str = ""
    """Id of the pause that is in force; empty for none."""
    pause_step: int = -1
    heals: bool = False
    """torchft: others train, from whom the state comes; no checkpoint is loaded."""


def is_kept_elsewhere(name: str) -> bool:
    """Return whether not the ranks but perdure's other parts apply this key."""
    return name.startswith(KEEPERS)


def render_value(value: Value) -> str:
    """Return `value` as a person types it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def find_fault(spec: KeySpec, value: Any) -> str:
    """Return why `spec` cannot hold `value`; empty where it can.

    >>> find_fault(KeySpec(name="lr", type="float", default=0.1, min=0), -1.0)
    'lr: -1 is below 0'
    """
    name, kind = spec.name, type(value).__name__
    if value is None and spec.optional:
        return ""
    fits = kind == spec.type or (spec.type == "float" and kind == "int")
    if not fits:
        return f"{name} is a {spec.type}, and {value!r} is a {kind}"
    if spec.type == "float" and value - value != 0:
        return f"{name}: {value!r} is not finite"
    if spec.choices and value not in spec.choices:
        return f"{name}: {render_value(value)} is none of {spec.range}"
    if spec.min is not None and spec.type in ("int", "float") and value < spec.min:
        return f"{name}: {render_value(value)} is below {spec.min:g}"
    if spec.max is not None and spec.type in ("int", "float") and value > spec.max:
        return f"{name}: {render_value(value)} is above {spec.max:g}"
    return ""


def find_product_fault(
    specs: Mapping[str, KeySpec], now: Mapping[str, Any], values: Mapping[str, Any]
) -> str:
    """Return which product `values` would change that has to stay; empty where none."""
    for name in values:
        names = specs[name].product if name in specs else ()
        old = new = 1
        for factor in names:
            old *= now.get(factor, 1)
            new *= values.get(factor, now.get(factor, 1))
        if old != new:
            return f"{' x '.join(names)} has to stay {old}, and would be {new}"
    return ""


def parse_value(spec: KeySpec, text: str) -> Value:
    """Return what `text` means for the key.

    Raises:
        ConfigError: nothing that it may hold.
    """
    if spec.optional and text.lower() == "none":
        return None
    try:
        value: Value = _PARSERS[spec.type](text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"{spec.name} is a {spec.type}, and `{text}` is none", hint=_hint(spec)
        ) from None
    fault = find_fault(spec, value)
    if fault:
        raise ConfigError(fault, hint=_hint(spec))
    return value


_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False,
          "on": True, "off": False}  # fmt: skip
_PARSERS: dict[str, Any] = {
    "bool": lambda text: _TRUTH[text.lower()],
    "int": lambda text: int(text.replace("_", ""), 10),
    "float": float,
    "str": str,
}


def _hint(spec: KeySpec) -> str:
    words = {"bool": "true or false", "str": "any text"}.get(spec.type, f"a {spec.type}")
    return f"{spec.name}: {spec.range or words}"


def find_note_fault(text: object) -> str:
    """Return why `text` is no remark, in a line; empty where it is one.

    >>> find_note_fault("  ")
    'the remark is empty'
    """
    if not isinstance(text, str) or not text.strip():
        return "the remark is empty"
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return "the remark is no text"
    if len(text) > NOTE_MAX:
        return f"the remark has {len(text)} characters, and {NOTE_MAX} are kept"
    return ""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks are and how fast they go, from heartbeats, which no journal has."""

    generation: int
    """-1 in a torchft job: of all groups, each of which has one of its own."""
    step: int
    """Committed by the furthest rank at `at_s`."""
    at_s: float
    step_s: float
    """What a step takes, by the last few seconds; above 0."""

    def estimate_step(self, now: float) -> float:
        """Return where that rank should be at `now`, parts of a step included."""
        return self.step + max(0.0, now - self.at_s) / self.step_s
