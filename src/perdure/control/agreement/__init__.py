"""What ranks are asked to do at one step, all of them or none."""
