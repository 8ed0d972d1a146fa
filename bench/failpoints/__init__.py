"""The campaign of failpoints: jobs with faults, what has to be so afterwards, what is tried."""
