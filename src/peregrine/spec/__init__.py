"""Speculative decoding: the round, its state, and the drafters."""
