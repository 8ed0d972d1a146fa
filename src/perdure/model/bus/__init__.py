"""What goes over the bus: messages, who may say them, versions."""
