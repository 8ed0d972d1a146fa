"""The benchmark of harm: healthy jobs, beat by beat, before the real detector and policy."""
