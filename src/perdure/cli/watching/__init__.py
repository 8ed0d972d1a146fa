"""`perdure watch` on a terminal: jobs, nodes, ranks and their logs, drawn and steered by keys."""
