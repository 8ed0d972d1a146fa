"""Commands that perdure finds by an entry point: profile, plan, trace, and `drill --on`."""
