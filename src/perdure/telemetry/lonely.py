"""Ranks of a world that know nothing of each other: each trains alone, and nothing fails.

It happens to scripts that ask for their world in another way than by torchrun's variables, or that
take one GPU each and none is there. All that can be seen is that no collective was ever made.
"""

from perdure.model.report import Snapshot

PATIENCE_S = 300.0
"""Ranks may run for so long without a collective before it is said: many prepare data at first."""
_SHORT_S = 3.0
"""A script that ends before is said nothing of."""
_LONELY = (
    "no collective was seen in a world of {ranks}: do the ranks train one model, or each its own? "
    "(torch.distributed.init_process_group, or what your library asks for, takes RANK and "
    "WORLD_SIZE)"
)


class LonelyWatch:
    """Takes snapshots, and says at most once that ranks do not speak with each other."""

    def __init__(self) -> None:
        """Begin before the first one."""
        self._generation, self._since_s = -1, 0.0
        self._ranks, self._met = 0, False

    def look(self, snapshot: Snapshot) -> str:
        """Return the line once the ranks have run alone for `PATIENCE_S`, else an empty text."""
        if snapshot.world_size < 2 or self._met:
            return ""
        if snapshot.step >= 0:  # Ranks that declare steps agree on them, by perdure itself.
            self._met = True
            return ""
        running = all(row.phase == "script" or row.collective for row in snapshot.ranks)
        if not running or not snapshot.ranks or snapshot.generation != self._generation:
            self._generation = snapshot.generation
            self._since_s = snapshot.at_s
            return ""
        if snapshot.at_s - self._since_s >= _SHORT_S:
            self._ranks = snapshot.world_size
        if any(row.collective for row in snapshot.ranks):
            self._met = True
        elif snapshot.at_s - self._since_s >= PATIENCE_S:
            self._met = True  # It is said once.
            return f"warning: {_LONELY.format(ranks=self._ranks)}"
        return ""

    def judge_end(self) -> str:
        """Return the line where a job has ended without one, and it was not said before."""
        return "" if self._met or not self._ranks else _LONELY.format(ranks=self._ranks)
