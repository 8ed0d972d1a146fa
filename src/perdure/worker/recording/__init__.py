"""What a rank writes down of itself: collectives, stages of a step, process groups, traces."""
