"""The nodes of a job that can be taken away and given back: of this machine, on boxes, in pods."""
