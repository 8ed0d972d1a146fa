"""The documents are held to what the commands really print."""
