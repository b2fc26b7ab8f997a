"""Training: the embedded model end to end, and draft heads for any model the engine loads."""
