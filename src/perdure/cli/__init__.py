"""The command line: words in, words out, exit codes; every command also speaks --json."""
