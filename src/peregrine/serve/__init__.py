"""The server: OpenAI's API over one engine, and batches of the same requests from a file."""
