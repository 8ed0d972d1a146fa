"""The event loops of supervisor, controller and agent: the only place where parts are wired."""
