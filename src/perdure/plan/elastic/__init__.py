"""Who holds what of an elastic world, and what of a step counts when somebody is lost."""
