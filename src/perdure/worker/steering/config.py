"""`run.config`: the run's live settings, the same on every rank at the same step.

A script declares what may be changed while it runs, with the value it starts with, and reads it
where it uses it. Values change only at step boundaries agreed by all ranks; each such change
makes a new configuration epoch, which is part of every checkpoint. Between them reading one is a
look into a dictionary, and nothing is asked of anybody.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.steering import (
    Change,
    KeySpec,
    find_fault,
    find_product_fault,
    is_kept_elsewhere,
)
from perdure.model.steering import (
    Value as Value,
)
from perdure.worker.system.stderr import say

Check = Callable[[Any], object]
"""Raises, or returns False or a reason, where a value will not do. Called beside training, by
another thread, before anything is promised: it must neither wait nor touch a model."""
OnChange = Callable[[Any], object]
"""Called in the training thread between two steps, with the new value."""


class Config(Mapping[str, Value]):
    """Settings by name, as attributes and as a mapping. Scripts only read it.

    >>> config = Config().declare("lr", float, default=0.1, min=0).declare(clip=1.0)
    >>> config.lr, config["clip"], config.epoch
    (0.1, 1.0, 0)
    """

    __slots__ = ("_changed", "_checks", "_epoch", "_hooks", "_on_declare", "_specs", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None) -> None:
        """Start with `values`, in epoch 0."""
        empty: dict[str, Any] = {
            "_values": {},
            "_specs": {},
            "_checks": {},
            "_hooks": {},
            "_changed": set(),
            "_epoch": 0,
            "_on_declare": lambda: None,
        }
        for name, held in empty.items():
            object.__setattr__(self, name, held)
        self.declare_all(values or {})

    def declare(
        self,
        name: str = "",
        type: type | None = None,
        *,
        default: Value | None = None,
        min: float | None = None,
        max: float | None = None,
        choices: Iterable[Value] = (),
        note: str = "",
        check: Check | None = None,
        on_change: OnChange | None = None,
        **defaults: Value,
    ) -> "Config":
        """Name a setting that may be changed (or several, `lr=0.1, clip=1.0`), and return self.

        A setting that already has a value, because it was changed or restored, keeps it.
        `check` may refuse a value for all ranks; `on_change` hears of a new one where reading it
        is not enough.

        Raises:
            ConfigError: a default is no plain value, or lies outside its own range.
        """
        if name:
            if default is None:
                raise ConfigError(f"setting {name!r} has no default", hint="default=...")
            kind = type or default.__class__
            value = float(default) if kind is float and isinstance(default, int) else default
            spec = KeySpec(
                name=name, type=_name_type(name, kind), default=value, min=min, max=max,
                choices=tuple(choices), note=note,
            )  # fmt: skip
            self._add(spec, check, on_change)
            if not defaults:
                self._on_declare()
        return self.declare_all(defaults)

    def declare_all(self, defaults: Mapping[str, Value]) -> "Config":
        """Declare settings by name and default, without more about them."""
        for each, value in defaults.items():
            spec = KeySpec(name=each, type=_name_type(each, value.__class__), default=value)
            self._add(spec, None, None)
        if defaults:
            self._on_declare()
        return self

    def declare_batch(
        self, *, micro_batch: int, accumulate: int = 1, on_change: OnChange | None = None
    ) -> "Config":
        """Declare `micro_batch` and `accumulate`, whose product has to stay what it is.

        So memory can be traded for time without a change of the global batch; leave `batch_size`
        of `run.batches` out, and it follows.
        """
        names = ("micro_batch", "accumulate")
        notes = ("Samples a rank and micro-batch.", "Micro-batches a step.")
        for name, value, note in zip(names, (micro_batch, accumulate), notes, strict=True):
            spec = KeySpec(name=name, type="int", default=value, min=1, note=note, product=names)
            self._add(spec, None, on_change)
        self._on_declare()
        return self

    def _add(self, spec: KeySpec, check: Check | None, on_change: OnChange | None) -> None:
        """Take a setting; where it has another value already, its hook hears of that now."""
        fault = find_fault(spec, spec.default)
        if fault:
            raise ConfigError(f"the default of a setting is impossible: {fault}")
        name = spec.name
        self._specs[name] = spec
        self._checks[name], self._hooks[name] = check or _accept, on_change or _accept
        kept = self._values.get(name, spec.default)
        fault = find_fault(spec, kept)
        if fault:
            say(f"a setting is back at its default: {fault}")
            kept = spec.default
        self._values[name] = kept
        if kept != spec.default:
            self._hooks[name](kept)

    # --- changes, by perdure ------------------------------------------------------------------

    def reapply(self, name: str) -> None:
        """Tell a setting's hook its value again, if it has one that is not the default."""
        spec = self._specs.get(name)
        if spec is not None and self._values[name] != spec.default:
            self._hooks[name](self._values[name])

    def specs(self) -> tuple[KeySpec, ...]:
        """Return what was declared."""
        return tuple(self._specs.values())

    def find_veto(self, change: Change) -> str:
        """Return why this rank cannot apply `change`; empty where it can."""
        for name, value in change.values.items():
            if is_kept_elsewhere(name):
                continue
            if name not in self._specs:
                return f"the script has not declared {name}"
            fault = find_fault(self._specs[name], value)
            if fault:
                return fault
            try:
                said = self._checks[name](value)
            except Exception as error:
                return f"{name}: {error or error.__class__.__name__}"
            if said is False or (isinstance(said, str) and said):
                return f"{name}: {said or 'its check refuses the value'}"
        return find_product_fault(self._specs, self._values, change.values)

    def apply(self, change: Change) -> None:
        """Put `change` in force. What a hook raises is raised: ranks must not differ unnoticed."""
        mine = {n: v for n, v in change.values.items() if n in self._specs}
        self._values.update(mine)
        self._changed.update(mine)
        object.__setattr__(self, "_epoch", max(self.epoch, change.epoch))
        for name, value in mine.items():
            self._hooks[name](value)

    def declare_own(self, spec: KeySpec, on_change: OnChange) -> None:
        """Declare a key of perdure's own, which only counts as saved once it was changed."""
        self._add(msgspec.structs.replace(spec, owner="perdure"), None, on_change)

    def when_declared(self, call: Callable[[], object]) -> None:
        """Have `call` hear of each declaration from now on."""
        object.__setattr__(self, "_on_declare", call)

    @property
    def epoch(self) -> int:
        """The newest change that it has seen; 0 for none."""
        return int(self._epoch)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        own = {n for n, s in self._specs.items() if s.owner == "perdure"} - self._changed
        values = {name: value for name, value in self._values.items() if name not in own}
        return {"epoch": self.epoch, "values": values}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept; settings declared since then keep their defaults."""
        values = state.get("values", {})
        self._values.update(values)
        object.__setattr__(self, "_epoch", int(state.get("epoch", 0)))
        for name, spec in list(self._specs.items()):
            if name in values:
                if spec.owner == "perdure":
                    self._changed.add(name)
                self._add(spec, self._checks[name], self._hooks[name])

    # --- reading ------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Value:
        """Return a setting by name."""
        return self._values[name]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return how many settings there are."""
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        """Return a setting; the error names those that are declared."""
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(sorted(self._values)) or "none"
            raise AttributeError(
                f"no setting {name!r} (declared: {known}); run.config.declare({name}=...) makes one"
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: values change at agreed steps only."""
        raise AttributeError(f"run.config is read-only; declare({name}=...) or `perdure set` it")

    def __repr__(self) -> str:
        """Return it as `Config(lr=0.1)`."""
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"Config({values})"


def _accept(value: object) -> None:
    """Do nothing about a value."""


def _name_type(name: str, kind: type) -> Literal["bool", "int", "float", "str"]:
    if kind not in (bool, int, float, str):
        raise ConfigError(
            f"setting {name!r} is a {kind.__name__}",
            hint="a setting is a bool, an int, a float or a str",
        )
    return cast(Literal["bool", "int", "float", "str"], kind.__name__)
