"""One line that makes a Lightning Trainer resumable.

    import perdure.lightning
    trainer = lightning.Trainer(max_epochs=3, strategy="ddp")
    perdure.lightning.attach(trainer)
    trainer.fit(model, loader)

Under `perdure run`, steps count, perdure's checkpoints are written beside training, and a run that
was killed goes on with the losses it would have had. Without perdure the line does nothing. See
docs/trainers.md.
"""

from perdure.worker.trainers.lightning import attach as attach
