"""Words in, words out, exit codes. Nothing is decided here."""
