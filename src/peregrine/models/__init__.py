"""Models as pure functions of (tokens, positions, attend): decoder, draft heads and their loading."""
