"""Results home before anything is deleted, and deleted once the platform says so."""
