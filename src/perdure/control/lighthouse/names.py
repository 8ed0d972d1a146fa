"""Which replica group a replica is that somebody else has started: by its name alone.

torchft makes a replica id of the name that the script gives and of a new UUID, `train_0:d5aa...`,
so that the next life of a group is known by the name, and as another one by the UUID. The number is
the name's own, by the digits at its end, where nobody has it yet. A script that gives no name has
nothing to be known by: each of its lives takes the place of one without a name that is gone.

Of groups that are gone the last few are known again; the numbers of others are free for whoever
comes, since a month may have thousands of names.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from perdure.model.bus.lighthouse import ENDED_KEPT

_NAMES_MAX = 1000
"""Groups that are told apart at a time; whoever comes beyond them trains, and is shown nowhere."""


@dataclass(slots=True)
class Names:
    """Numbers groups and their lives, in the order in which they come."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Name of a group -> its number; of one without a name a colon, and the number once more.
    Who was last known to be there comes last."""
    lives: int = 0
    """Of all groups so far."""

    def place(
        self, replica: str, present: Collection[int], held: Collection[int] = ()
    ) -> tuple[int, int]:
        """Return the group of a new life, and the number of that life; -1 where there are too many.

        `present` are the groups that are there, and `held` those whose next life is to be known.

        >>> names = Names()
        >>> names.place("train_1:ab", ()), names.place("train_0:cd", (1,))
        ((1, 0), (0, 1))
        >>> names.place("train_1:ef", (0,)), names.place("eval_1:ab", (0, 1)), names.place("x", ())
        ((1, 2), (2, 3), (3, 4))
        """
        name, _, _ = replica.rpartition(":")
        if not name:
            free = [n for key, n in self.numbers.items() if key[0] == ":" and n not in present]
            name = f":{min(free)}" if free else ""
        group = self.numbers.get(name, -1)
        self._forget_gone({*present, group}, held)
        if group < 0:
            group = self._choose(name)
            if group < 0:
                return -1, -1
            self.numbers[name or f":{group}"] = group
        self.lives += 1
        return group, self.lives - 1

    def _forget_gone(self, present: Collection[int], held: Collection[int]) -> None:
        for name in [name for name, number in self.numbers.items() if number in present]:
            self.numbers[name] = self.numbers.pop(name)
        kept = {*present, *held}
        gone = [name for name, number in self.numbers.items() if number not in kept]
        room = max(0, _NAMES_MAX - 1 - (len(self.numbers) - len(gone)))
        for name in gone[: max(0, len(gone) - min(ENDED_KEPT, room))]:
            del self.numbers[name]

    def _choose(self, name: str) -> int:
        taken = set(self.numbers.values())
        digits = re.search(r"\d{1,3}$", name)
        if digits is not None and int(digits[0]) not in taken:
            return int(digits[0])
        return next((number for number in range(_NAMES_MAX) if number not in taken), -1)
