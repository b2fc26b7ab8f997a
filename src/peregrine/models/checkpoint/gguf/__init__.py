"""GGUF files: the header, the config it describes, and its tensors, all in Hugging Face's words."""
