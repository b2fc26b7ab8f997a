"""Measurements: each reports ratios within one run, and none of them decides a test."""
