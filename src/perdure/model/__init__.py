"""Nouns: job, progress, verdicts, events, actions, messages, reports, errors. No behaviour."""
