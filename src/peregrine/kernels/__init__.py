"""Kernels: one folder per operation, with a torch twin in `reference.py` and one file per device.

A folder's `__init__` is what other units import. Every row's result has the same bits in every batch, from the kernel
and from the twin.
"""
