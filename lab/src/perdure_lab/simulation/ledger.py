"""Slot-seconds by account, and training that may yet turn out to be lost."""

from dataclasses import dataclass

from perdure.model.report import ACCOUNTS


@dataclass(slots=True)
class Work:
    """Training done: what it made, and whose time it took."""

    seconds: float = 0.0
    samples: float = 0.0
    useful: float = 0.0
    """Slot-seconds."""
    overhead: float = 0.0
    """Slot-seconds of the policy's own."""

    def add(self, other: "Work", sign: float = 1.0) -> None:
        """Add `other`, or take it away; never below nothing."""
        self.seconds = max(0.0, self.seconds + sign * other.seconds)
        self.samples = max(0.0, self.samples + sign * other.samples)
        self.useful = max(0.0, self.useful + sign * other.useful)
        self.overhead = max(0.0, self.overhead + sign * other.overhead)

    def scale(self, factor: float) -> "Work":
        """Return a part of it."""
        return Work(
            self.seconds * factor,
            self.samples * factor,
            self.useful * factor,
            self.overhead * factor,
        )


class Ledger:
    """Where the slot-seconds went."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.accounts = dict.fromkeys(ACCOUNTS, 0.0)
        self.samples = 0.0

    def spend(self, account: str, slot_s: float) -> None:
        """Put slot-seconds into an account."""
        self.accounts[account] += slot_s

    def keep(self, work: Work) -> None:
        """Count training as useful, until it is taken back."""
        self.samples += work.samples
        self.accounts["useful"] += work.useful
        self.accounts["steady_overhead"] += work.overhead

    def take_back(self, work: Work, account: str = "lost_work") -> None:
        """Move training that was counted to another account: its samples are not committed."""
        self.samples -= work.samples
        self.accounts["useful"] -= work.useful
        self.accounts["steady_overhead"] -= work.overhead
        self.accounts[account] += work.useful + work.overhead

    def close(self, slot_s: float) -> dict[str, float]:
        """Return each account's share of all that was paid for; what is left is unattributed."""
        accounts = {**self.accounts, "unattributed": slot_s - sum(self.accounts.values())}
        return {name: value / slot_s if slot_s else 0.0 for name, value in accounts.items()}
