"""From a failure to the next generation: who is blamed, who is left out, who runs the world."""
