"""`perdure dash`: a job as a page in a browser, read from its files, steered by the bus."""
