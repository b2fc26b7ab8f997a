"""Where keys and values live: the page pool, the prefix tree and the stores."""
