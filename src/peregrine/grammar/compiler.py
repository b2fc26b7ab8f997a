"""From a constraint to a matcher: compiled, kept, and copied for each request that asks for the same.

Copies of a compiled grammar share its lexer, and the library computes one mask at a time with a lexer. So requests that
run at the same time get grammars of their own, compiled once more, as far as there are cores to compute their masks.

llguidance bounds its work by counts of steps, so what a hostile grammar can take is bounded. It says which keyword of a
schema it cannot honour, and such a schema is refused.
"""

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from peregrine.errors import RequestError
from peregrine.grammar.matcher import Matcher, MatcherLimits
from peregrine.sampling import Constraint
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tools import closed
from peregrine.threads import usable_cores

GRAMMARS_PRESENT = importlib.util.find_spec("llguidance") is not None
INSTALL = "run: pip install llguidance"
MAX_KEPT = 128  # compiled grammars
# Compact JSON: a model that may write white space may write it for ever. A schema's own options do not count.
JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
# A fifth and a quarter of the library's own limits, with which a hostile regex took seconds for its first mask.
LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "verbose_errors": False}
# Tokens of a string of JSON, by their characters: where so many fit, all of them are legal at once. The library's own
# steps are 10 and 30, with which masks near a string's maxLength take one and a half times as long.
STRING_STEPS = (2, 4, 6, 8, 10, 12, 14, 16, 30)
MAX_PROBLEM = 300  # characters of the library's own explanation
REGEX_PROBLEM = re.compile(r".* error: (.*?) 1 \| start:")  # around it stands the grammar that holds the expression


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar at its beginning, and the matchers that were copied from it."""

    template: Any
    users: WeakSet[Matcher]


class GrammarCompiler:
    """Makes matchers for one vocabulary; may be called from any thread, and should not be from the engine's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._library_tokenizer: Any = None
        self._unusable = ""  # why there is none
        self._kept: OrderedDict[Constraint, list[Compiled]] = OrderedDict()  # the least recently used first
        self._most_alike = usable_cores()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Make what every grammar needs, if it has not been made.

        It takes two seconds for a vocabulary of 128k tokens, and the library holds Python's lock all the time.
        """
        with self._lock:
            if GRAMMARS_PRESENT and self._library_tokenizer is None and not self._unusable:
                try:
                    self._library_tokenizer = self._make_tokenizer()
                except ValueError as error:
                    self._unusable = f"llguidance cannot use this model's tokenizer ({error})"

    def matcher(self, constraint: Constraint, limits: MatcherLimits) -> Matcher:
        """A matcher at its beginning; RequestError if the constraint cannot be honoured."""
        if not GRAMMARS_PRESENT:
            raise RequestError(constraint.kind, constraint.text, "needs llguidance, which is not installed", INSTALL)
        if not limits.end_ids:
            problem = "the model has no end token, so a complete text could not end"
            raise RequestError(constraint.kind, constraint.text, problem, "pass a special token in stop_token_ids")
        self.load()
        if self._unusable:
            raise RequestError(constraint.kind, constraint.text, self._unusable, "leave it out, and check the text")
        compiled = self._least_used(constraint)
        matcher = Matcher(compiled.template, self._vocab_size, frozenset(self._eos_ids), limits)
        compiled.users.add(matcher)
        return matcher

    def _least_used(self, constraint: Constraint) -> Compiled:
        """The compiled grammar with the fewest users, or one more if all have some."""
        with self._lock:
            kept = self._kept.get(constraint, [])
            found = min(kept, key=lambda compiled: len(compiled.users), default=None)
            if found is not None and (not found.users or len(kept) >= self._most_alike):
                self._kept.move_to_end(constraint)
                return found
        found = Compiled(compile_constraint(constraint, self._library_tokenizer), WeakSet())  # others need not wait
        with self._lock:
            self._kept.setdefault(constraint, []).append(found)
            self._kept.move_to_end(constraint)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _make_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        # The library must name some end token; a model without one has its matchers refused above unless the request
        # brings its own, and those are added to the masks by the matcher.
        ends = list(self._eos_ids) or [self._vocab_size - 1]
        spaces, *_, strings = LLTokenizer.general_slices()  # the last one is for strings of any length
        slices = [spaces, *(f"{strings.removesuffix('+')}{{1,{most}}}" for most in STRING_STEPS), strings]
        text = self._tokenizer.backend.to_str()
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends, slices=slices)


def compile_constraint(constraint: Constraint, tokenizer: Any) -> Any:
    """The constraint as a matcher at its beginning; RequestError says what cannot be honoured."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = library_grammar(constraint)
    except ValueError as error:
        raise RequestError(constraint.kind, constraint.text, str(error), "correct it") from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    first = matcher.deep_copy()
    if not matcher.is_error():
        # Some contradictions, and texts that can never end, show only at the first steps.
        matcher.compute_bitmask()
        first = matcher.deep_copy()
        first.consume_tokens(first.compute_ff_tokens())
    for tried in (matcher, first):
        if tried.is_error():
            raise RequestError(constraint.kind, constraint.text, *explain(constraint, tried.get_error()))
    return matcher


def library_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own notation."""
    from llguidance import LLMatcher, grammar_from

    match constraint.kind:
        case "json_schema":
            schema = dict(closed(json.loads(constraint.text)))
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=JSON_OPTIONS))
        case "regex":
            return str(LLMatcher.grammar_from_lark(f"start: {regex_in_lark(constraint.text)}"))
        case "choice":
            # As one terminal: as alternatives of a rule, 2,000 texts would be too many, and masks slow for 1,000.
            return str(LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {choice_in_lark(constraint.text)}"))
        case _ if constraint.text.startswith("%llguidance"):
            return str(LLMatcher.grammar_from_lark(constraint.text))
        case _:
            return str(grammar_from("grammar", constraint.text))  # in Lark's or GBNF's syntax


def regex_in_lark(regex: str) -> str:
    """The expression as Lark writes it: \\d is 0 to 9, not every digit of Unicode, as in patterns of JSON schemas."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, 'd')}/"


def choice_in_lark(texts: str) -> str:
    """A JSON list of texts as Lark's alternatives."""
    # Lark's lexer takes no control characters, and JSON leaves one of them as it is.
    return " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in json.loads(texts))


def lark_definition(constraint: Constraint) -> str | None:
    """The constraint as a rule or a terminal of a larger grammar in Lark's syntax; None: it is a whole grammar."""
    match constraint.kind:
        case "regex":
            return f"ANSWER: {regex_in_lark(constraint.text)}"
        case "choice":
            return f"ANSWER: {choice_in_lark(constraint.text)}"
        case "json_schema" | "json_object":
            schema = closed(json.loads(constraint.text or '{"type": "object"}'))
            return f"answer: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"
    return None


def explain(constraint: Constraint, error: str) -> tuple[str, str]:
    """The problem and the remedy of a grammar that the library refused."""
    problem = " ".join(error.replace("<non-verbose/>", "").split())[:MAX_PROBLEM]
    if constraint.kind == "regex" and (found := REGEX_PROBLEM.match(problem)):
        problem = found[1]
    if "NoExtension" in problem:
        return "no text can satisfy it", "correct it"
    if any(sign in problem for sign in ("Too many items", "too many", "too large", "max is", "fuel")):
        return f"is too complex ({problem})", "simplify it; a reference must be able to end"
    if constraint.kind in ("json_schema", "json_object"):
        remedy = "leave the keyword out, or state it another way (anyOf, enum, const, pattern)"
        return f"cannot be honoured: {problem}", remedy
    return f"cannot be read: {problem}", "correct it"
