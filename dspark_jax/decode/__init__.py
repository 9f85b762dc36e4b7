"""The decode step, the device loop around it, and the session that users call."""
