"""From a fresh interpreter, or a fork of the warm image, to a script's first line."""
