"""Checks for any attention backend: answers near float64, and bits that depend on a query and its keys alone."""

from peregrine.attention.conformance.cases import Case, conformance_cases
from peregrine.attention.conformance.report import Report, run_conformance

__all__ = ["Case", "Report", "conformance_cases", "run_conformance"]
