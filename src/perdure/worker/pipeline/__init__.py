"""Pipelines executed: the orders of `plan/pipeline` carried out, over real tensors and messages.

    schedule = Schedule(orders, stages, members)         # checked; the same in every process
    parts = [StageBlocks(stage, blocks, first, recompute=...) for each stage of my cell]
    runner = Runner(schedule, my_cell, parts, group, load=load, loss=loss, seed=seed)
    losses = runner.run(step, membership.overtaken)       # gradients are in p.grad, summed

`group` is the elastic engine's `Group`, or anything else that sends and receives alike; cell i is
the member `members[i]`. `orders` are those of `plan.worlds.score.plan_orders` or of
`Scorer.lay_out` for a world, or of `plan.pipeline` directly; a micro-batch may change its column at
every stage. Any order that `simulate` can carry out runs here without a deadlock.

- `load(step, micro_batch)` returns (inputs, targets). The first stage's cell asks for it and the
  last one's, so it must depend on its arguments alone. `loss(output, targets)` is a mean over the
  micro-batch. A block takes and returns a tensor, or a tuple of tensors; the first one takes
  whatever `load` gives.
- `run` returns {micro-batch: loss} where this cell has the last stage. Gradients are sums over this
  cell's micro-batches, added to `p.grad`, and not divided by anything. Nothing is reduced over the
  copies of a stage.
- Generators are seeded before each block by (seed, step, micro-batch, block): the world does not
  matter. With `trees` ({block: GradientTree}), gradients go there, each micro-batch's by itself
  and in `block.parameters()` order: what a tree sums up is bitwise the same in every world.
- `Broken` ends an attempt: a member was lost, or `overtaken()`, which is asked between two actions.
  Then `runner.done` has the (stage, micro-batch) whose gradients are wholly added, and nothing of
  any other is. A runner is for one world; the next is given a new one, whose `run(counted=...)`
  computes of such pairs only what others need, and adds nothing to their gradients.
- `runner.executed` is the step's timeline; `runner.before` is called before each action, for
  instance to arm buckets before a stage's last backward.
"""

from perdure.worker.pipeline.runner import Runner as Runner
from perdure.worker.pipeline.runner import Schedule as Schedule
from perdure.worker.pipeline.stage import StageBlocks as StageBlocks
