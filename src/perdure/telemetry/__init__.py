"""Folds over the journal: ledger, incidents, snapshot."""
