"""The operating system below a rank: its processes, locks, sockets, streams, and cgroups."""
