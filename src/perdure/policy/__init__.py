"""Verdict, history and budget in, decision with its reason out."""

from perdure.policy.checkpointing import decide_checkpoint_interval
from perdure.policy.recovery import Decision, Failure, decide_recovery

__all__ = ["Decision", "Failure", "decide_checkpoint_interval", "decide_recovery"]
