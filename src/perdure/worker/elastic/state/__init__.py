"""What an elastic rank trains, by kind of state."""
