"""T16: whatever the size of the world, a rank twice as slow is named within 3 s or 20 steps."""

import pytest
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Noise, Run


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("begin_s", [BEGIN_S, FAULT_S], ids=["from the first step", "later"])
def test_a_slow_rank_is_named_in_a_world_of_any_size(size: int, begin_s: float) -> None:
    for factor, step_s in ((2.0, 0.1), (3.3, 0.3), (2.0, 1.0)):
        patience_s = max(3.0, 20 * step_s * factor)
        fault = Fault("slow-backward", begin_s, 1, 0, factor)
        run = Run(Layout(size), fault, noise=Noise(jitter=0.05), step_s=step_s)
        run.run(begin_s - BEGIN_S + patience_s + 0.4)
        assert run.verdicts, f"{factor}x at steps of {step_s} s: nothing after {patience_s:g} s"
        first = run.verdicts[0]
        assert (first.kind, first.culprit.rank) == ("Straggler", 1)
        assert first.confirmed_s - begin_s <= patience_s + 0.4
