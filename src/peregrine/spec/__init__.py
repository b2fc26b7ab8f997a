"""Speculative decoding: the round, its state, and every way to guess."""
