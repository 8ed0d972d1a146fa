"""Training whose survivors do not even leave their loop.

    import perdure.elastic
    perdure.elastic.train(
        blocks=[...], optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        dataset=dataset, loss=cross_entropy, global_batch=64, micro_batch=8, steps=1000,
    )

`open_trainer` is the same for those who write their own loop. What is long and silent, such as an
evaluation in `on_step`, is declared: `with perdure.elastic.busy("evaluate", at_most_s=600): ...`.
See docs/elastic.md.
"""

from perdure.worker.busy import declare_busy
from perdure.worker.elastic import Step as Step
from perdure.worker.elastic import Trainer as Trainer
from perdure.worker.elastic import config as config
from perdure.worker.elastic import hash_tensors as hash_tensors
from perdure.worker.elastic import open_sharded_trainer as open_sharded_trainer
from perdure.worker.elastic import open_trainer as open_trainer
from perdure.worker.elastic import train as train
from perdure.worker.work import declare_work

busy = declare_busy
work = declare_work
