"""Checkpoint files: folders, config fields, tensors, quantised formats."""
