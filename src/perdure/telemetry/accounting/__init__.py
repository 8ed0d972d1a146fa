"""Where the paid time went: the journal by generation and rank, incidents, and the ledger."""
