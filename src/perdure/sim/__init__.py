"""The same machines under a virtual clock, with seeded faults."""
