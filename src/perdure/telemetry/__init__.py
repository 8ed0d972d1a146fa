"""Folds over the journal: ledger, incidents, verdicts, the live snapshot, curves.

`history` sorts the journal, `timeline` cuts each rank's time into `segments`, `ledger` adds them
up and makes the report.
"""
