"""`run.config`: the run's live settings, the same on every rank at the same step.

A script declares what may be changed while it runs, with the value it starts with, and reads it
where it uses it. Values change only at step boundaries agreed by all ranks; each such change
makes a new configuration epoch, which is part of every checkpoint.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from perdure.model.errors import ConfigError

Value = bool | int | float | str


class Config(Mapping[str, Value]):
    """Settings by name, as attributes and as a mapping. Scripts only read it.

    >>> config = Config().declare(lr=0.1)
    >>> config.lr, config["lr"], config.epoch
    (0.1, 0.1, 0)
    """

    __slots__ = ("_epoch", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None) -> None:
        """Start with `values`, in epoch 0."""
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_epoch", 0)
        self.declare(**(values or {}))

    def declare(self, **defaults: Value) -> "Config":
        """Name the settings that may be changed, and return self.

        A setting that already has a value, because it was changed or restored, keeps it.

        Raises:
            ConfigError: a default is no plain value.
        """
        for name, value in defaults.items():
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(
                    f"setting {name!r} is a {type(value).__name__}",
                    hint="a setting is a bool, an int, a float or a str",
                )
            self._values.setdefault(name, value)
        return self

    @property
    def epoch(self) -> int:
        """How many changes it has seen."""
        return int(self._epoch)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"epoch": self.epoch, "values": dict(self._values)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept; settings declared since then keep their defaults."""
        self._values.update(state.get("values", {}))
        object.__setattr__(self, "_epoch", int(state.get("epoch", 0)))

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
