"""Trainers whose loop is not ours, in the resumable depth. Each module imports its library.

A script attaches its Trainer itself (`perdure.huggingface.attach`, `perdure.lightning`): nothing
looks for one.
"""
