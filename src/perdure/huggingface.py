"""One line that makes a Hugging Face Trainer resumable.

    import perdure.huggingface
    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    perdure.huggingface.attach(trainer)
    trainer.train()

Under `perdure run`, steps count, perdure's checkpoints are written beside training, and a run that
was killed goes on with the losses it would have had. Without perdure the line does nothing. See
docs/trainers.md.
"""

from perdure.worker.trainers.huggingface import attach as attach
