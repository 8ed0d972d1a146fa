"""torchft's lighthouse as a process, and what hears ranks that others have started."""
