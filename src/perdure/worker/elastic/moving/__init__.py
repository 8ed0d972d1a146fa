"""State on its way between the members of a new world."""
