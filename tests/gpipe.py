"""A schedule that perdure does not offer, and the simplest that there is."""

from collections.abc import Sequence

from perdure.model.planning.pipeline import Action


def order_gpipe(ranks: int, micro_batches: Sequence[int]) -> list[list[Action]]:
    """Return all forwards, then all backwards.

    Everything is in flight at once. Source: Y. Huang et al., GPipe, NeurIPS 2019.
    """
    return [
        [Action(kind, rank, m) for kind in ("F", "B") for m in micro_batches]
        for rank in range(ranks)
    ]
