"""What operators ask of a running job: commands, live configuration, pauses, verbs."""
