"""What is computed, in the order of a call. Never asks for a device."""
