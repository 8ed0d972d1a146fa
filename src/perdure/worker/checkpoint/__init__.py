"""Checkpoints: copied beside training, written beside training, tagged after verification."""

from perdure.worker.checkpoint.checkpointer import Checkpointer as Checkpointer
