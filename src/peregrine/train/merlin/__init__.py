"""The recipe of merlin, the embedded model: tokenizer, target and draft head from a folder of text."""
