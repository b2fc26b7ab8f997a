"""Constrained text: which tokens a request's schema, regex or grammar allows next, by the llguidance library."""

from peregrine.grammar.compiler import GRAMMARS_PRESENT, GrammarCompiler, lark_definition
from peregrine.grammar.matcher import Matcher, MatcherLimits, Window

__all__ = ["GRAMMARS_PRESENT", "GrammarCompiler", "Matcher", "MatcherLimits", "Window", "lark_definition"]
