"""How the command line speaks."""
