"""A kit that any attention backend can be held against: right answers, and bits that depend on nothing else."""

from peregrine.attention.conformance.cases import Case, conformance_cases
from peregrine.attention.conformance.report import Report, run_conformance

__all__ = ["Case", "Report", "conformance_cases", "run_conformance"]
