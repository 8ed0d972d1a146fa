"""A trace of availability played on this machine: real processes, really killed and started."""
