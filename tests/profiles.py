"""Cost profiles for tests: round figures, made up."""

from collections.abc import Sequence

from perdure.model.planning.costs import AllReduce, Block, BlockCost, CostProfile, Transfer

MB = 1_000_000
GB = 1_000 * MB


def make_block(
    name: str, forward_s: float, sizes: Sequence[int] = (1,), *, state: int = 0, stored: int = 0,
    inputs: int = 0, backward: float = 2.0, weight: float | None = None,
) -> Block:  # fmt: skip
    """Return a block whose times and activations grow with the micro-batch; `state` in all."""
    costs = {
        size: BlockCost(
            forward_s=forward_s * size,
            backward_s=backward * forward_s * size,
            recompute_s=forward_s * size,
            input_bytes=inputs * size,
            stored_bytes=stored * size,
            weight_s=None if weight is None else weight * forward_s * size,
        )
        for size in sizes
    }
    quarter = state // 4
    return Block(name, quarter, quarter, state - 2 * quarter, 0.0, costs)


def make_profile(
    forwards_s: Sequence[float], sizes: Sequence[int] = (1,), *, state: int = 0, stored: int = 0,
    inputs: int = 0, links: bool = True, weight: float | None = None,
) -> CostProfile:  # fmt: skip
    blocks = tuple(
        make_block(f"b{i}", s, sizes, state=state, stored=stored, inputs=inputs, weight=weight)
        for i, s in enumerate(forwards_s)
    )
    if not links:
        return CostProfile("model", "machine", 0, blocks)
    transfers = (Transfer("node", 1e-5, 100e9), Transfer("cluster", 1e-4, 10e9))
    reduces = (
        AllReduce("node", 2, 2e-5, 100e9),
        AllReduce("cluster", 2, 2e-4, 10e9),
        AllReduce("cluster", 8, 14e-4, 5.7e9),
    )
    return CostProfile("model", "machine", 0, blocks, transfers, reduces)
