"""Sampling parameters of a request; wrong values are refused here, before anything runs."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real

from peregrine.config import option
from peregrine.errors import RequestError

MAX_STOPS = 64  # strings, each looked for at every character
MAX_STOP_CHARACTERS = 1024  # of one of them
MAX_CHOICES = 128
MAX_STOP_IDS = 32  # a request's own and the model's end-of-text ids
MAX_EOS_IDS = MAX_STOP_IDS // 2
MAX_BIAS = 512
MAX_LOGPROBS = 64
SEED_BITS = 63
DRAWN_BITS = 53  # of seeds that are drawn and reported: JavaScript's numbers hold them exactly
MAX_GRAMMAR_BYTES = 1 << 18  # of a schema, regex, grammar or all choices together
MAX_GRAMMAR_DEPTH = 64  # of nested objects and lists in a schema
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")
UNSET: dict[str, object] = {"json_object": False, "choice": ()}  # of constraints; None leaves out any of them
LARGEST = 2**31 - 1  # of counts of tokens; no context holds as many

# Field: lowest and highest value, what to pass instead. Beyond these limits logits overflow float32.
NUMBERS = {
    "temperature": (0.0, 100.0, "use 0 for greedy, 1 for the model's own distribution"),
    "top_p": (0.0, 1.0, "use a share of the mass in (0, 1]"),
    "min_p": (0.0, 1.0, "use a share of the largest probability in [0, 1]"),
    "repetition_penalty": (0.01, 100.0, "use 1 for none, such as 1.1 for a little"),
    "presence_penalty": (-2.0, 2.0, "use a value in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "use a value in [-2, 2]"),
}
INTEGERS = {
    "n": (1, MAX_CHOICES, f"use 1 to {MAX_CHOICES}"),
    "top_k": (-1, LARGEST, "use 0 (or -1, or None) for no limit"),
    "seed": (0, 2**SEED_BITS - 1, "use a non-negative 63-bit integer"),
    "max_tokens": (1, LARGEST, f"use 1 to {LARGEST}, or None for the rest of the context"),
    "min_tokens": (0, LARGEST, "use 0 or more, and at most max_tokens"),
    "logprobs": (0, MAX_LOGPROBS, f"use 0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"use 0 to {MAX_LOGPROBS}, or None"),
    "num_drafts": (0, LARGEST, "use 0 for no speculation"),
}
TREES = ("auto", "chain", "tree")
FLAGS = ("ignore_eos", "skip_special_tokens", "detokenize", "report_drafts", "json_object", "store")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language that a request's text must be a member of."""

    kind: str  # one of CONSTRAINTS
    text: str  # the schema or the choices as JSON, the regex, or the grammar in Lark's or GBNF's syntax


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Applied in this order: logit_bias, penalties, min_tokens, grammar, temperature, top_k, top_p, min_p, then noise
    from the seed. Temperature 0 takes the largest logit. `logprobs=n` returns log-probabilities of the chosen token
    and the n likeliest ones in the model's own distribution, before all of the above. `prompt_logprobs=n` returns them
    for the prompt's tokens; such a prompt is always read in full, without the prefix cache.

    At most one of json_schema, json_object, regex, grammar and choice constrains the text: tokens that cannot be part
    of it are never chosen, and the text ends when it is complete, or where it may end and the model ends it. JSON is
    written without white space, and without properties that its schema neither lists nor mentions. `min_tokens` gives
    way where the text is complete.

    None means the default, except for max_tokens, where it means the rest of the context. Numbers of numpy are taken as
    Python's. A value that cannot be honoured raises RequestError with the field, the value and what to pass instead.
    """

    n: int = option(1, "generations per prompt; generation i has the seed `seed + i`", "N")
    temperature: float = option(1.0, "0 takes the likeliest token, 1 samples the model's own distribution", "T")
    top_k: int = option(0, "sample among the k likeliest tokens; 0: all", "K")
    top_p: float = option(1.0, "sample among the likeliest tokens that together hold this probability", "P")
    min_p: float = option(0.0, "drop tokens below this share of the largest probability", "P")
    repetition_penalty: float = option(1.0, "above 1 makes tokens of prompt and output less likely; 1: off", "X")
    presence_penalty: float = option(0.0, "subtract once from the logits of tokens generated before", "X")
    frequency_penalty: float = option(0.0, "subtract for each time a token was generated before", "X")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"help": "add to a token's logit; repeatable", "metavar": "ID=BIAS", "flag": ""}
    )
    seed: int | None = option(None, "the same seed gives the same tokens; drawn and reported if absent", "SEED")
    max_tokens: int | None = option(128, "tokens to generate at most; none: as many as the context holds", "N")
    min_tokens: int = option(0, "neither a stop token nor a stop string ends the first N tokens", "N")
    stop: str | Sequence[str] = option((), "end before this text; repeatable", "TEXT")
    stop_token_ids: Sequence[int] = option((), "end at this token; repeatable", "ID", flag="stop_token_id")
    ignore_eos: bool = option(False, "do not end at the model's end-of-text token")
    logprobs: int | None = option(None, "report log-probabilities: the token's own and the N largest", "N")
    prompt_logprobs: int | None = option(None, "report log-probabilities of the prompt's tokens", "N")
    json_schema: Mapping[str, object] | str | None = option(
        None, "the text is JSON that this schema (a file) allows", "FILE"
    )
    json_object: bool = option(False, "the text is a JSON object")
    regex: str | None = option(None, "the whole text matches this regular expression", "RE")
    grammar: str | None = option(
        None, "the text is a sentence of this grammar (a file in Lark's or GBNF's syntax)", "FILE"
    )
    choice: Sequence[str] = option((), "the text is one of these; repeatable", "TEXT")
    grammar_after: int | None = None  # the constraint holds after the first token with this id, and not before
    num_drafts: int | None = None  # cap on drafts for this request; 0: no speculation; None: the engine's
    tree: str = "auto"  # auto: chains of drafts branch where that pays; chain: they never do; tree: they always do
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    detokenize: bool = True  # False: token ids alone, no text and no stop strings
    report_drafts: bool = False  # deltas carry the drafts of their round, rejected ones too
    store: bool = True  # False: the suffix drafter does not learn from the answer

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is None and entry.name != "max_tokens":
                self._set(entry.name, {} if entry.name == "logit_bias" else entry.default)
        for name, limits in NUMBERS.items():
            self._set(name, checked_number(name, getattr(self, name), *limits))
        for name, (low, high, remedy) in INTEGERS.items():
            if getattr(self, name) is not None:
                self._set(name, checked_integer(name, getattr(self, name), low, high, remedy))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "is not true or false", "pass a bool")
        if self.tree not in TREES:
            raise RequestError("tree", self.tree, "is not a choice", f"use {', '.join(TREES)}")
        if self.tree == "tree" and self.num_drafts == 0:
            raise RequestError("tree", self.tree, "num_drafts=0 drafts nothing", "keep one of them")
        if self.top_p == 0:
            raise RequestError("top_p", self.top_p, "keeps no token", NUMBERS["top_p"][2])
        self._set("top_k", max(0, self.top_k))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"exceeds max_tokens={self.max_tokens}", "lower it")
        self._check_stops()
        self._check_bias()
        self._check_constraint()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def generations(self) -> "list[SamplingParams]":
        """The parameters of each of the n generations: equal but for the seeds, which follow each other."""
        if self.n == 1:
            return [self]
        seed = secrets.randbits(DRAWN_BITS) if self.seed is None else self.seed
        return [replace(self, n=1, seed=(seed + i) % 2**SEED_BITS) for i in range(self.n)]

    @property
    def constraint(self) -> Constraint | None:
        """What the text must be, if anything is asked of it."""
        if self.json_schema is not None:
            schema = self.json_schema
            return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        if self.json_object:
            return Constraint("json_object", "")
        if self.choice:
            return Constraint("choice", json.dumps(list(self.choice)))
        for kind, text in (("regex", self.regex), ("grammar", self.grammar)):
            if text is not None:
                return Constraint(kind, text)
        return None

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, UNSET.get(name))]
        if len(given) > 1:
            raise RequestError(given[1], getattr(self, given[1]), f"{given[0]} was given, too", "keep one of them")
        if not given:
            return
        field = given[0]
        if field == "json_schema":
            check_schema(field, self.json_schema)
        if field == "choice" and (
            not isinstance(self.choice, list | tuple)
            or not self.choice
            or not all(isinstance(text, str) and text for text in self.choice)
        ):
            raise RequestError(field, self.choice, "is not a list of non-empty texts", "pass one text or more")
        if field in ("regex", "grammar") and not (isinstance(getattr(self, field), str) and getattr(self, field)):
            raise RequestError(field, getattr(self, field), "is not a non-empty text", "leave it out for free text")
        constraint = self.constraint
        assert constraint is not None
        size = len(constraint.text.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(field, f"{size} bytes", "is too large", f"pass at most {MAX_GRAMMAR_BYTES} bytes")
        if self.ignore_eos:
            raise RequestError("ignore_eos", True, f"a text with {field} ends by an end token", "keep one of them")
        if self.grammar_after is not None:
            checked_integer("grammar_after", self.grammar_after, 0, LARGEST, "use a token id")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple):
            raise RequestError("stop", self.stop, "is not a string or a list of strings", "pass strings")
        if len(self.stops) > MAX_STOPS:
            raise RequestError("stop", f"{len(self.stops)} strings", "are too many", f"pass at most {MAX_STOPS}")
        for text in self.stops:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
                remedy = f"pass strings of 1 to {MAX_STOP_CHARACTERS} characters"
                raise RequestError("stop", text, "is empty, too long, or not a string", remedy)
        if self.stops and not self.detokenize:
            raise RequestError("detokenize", False, "stop strings are found in text", "leave stop out, or set it")
        ids, most = self.stop_token_ids, MAX_STOP_IDS - MAX_EOS_IDS
        if not isinstance(ids, list | tuple):
            raise RequestError("stop_token_ids", ids, "is not a list of token ids", "pass integers")
        if len(ids) > most:
            raise RequestError("stop_token_ids", ids, f"holds {len(ids)} ids", f"pass at most {most}")
        limits = (0, LARGEST, "pass token ids")
        self._set("stop_token_ids", tuple(checked_integer("stop_token_ids", i, *limits) for i in ids))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError("logit_bias", bias, "is not a mapping", "pass {token id: bias}")
        if len(bias) > MAX_BIAS:
            raise RequestError("logit_bias", len(bias), "holds too many entries", f"pass at most {MAX_BIAS}")
        ids = [checked_integer("logit_bias", i, 0, LARGEST, "use token ids as keys") for i in bias]
        values = [checked_number("logit_bias", x, -100.0, 100.0, "use values in [-100, 100]") for x in bias.values()]
        self._set("logit_bias", dict(zip(ids, values, strict=True)))


def check_schema(field: str, schema: object) -> None:
    """Refuse what is no JSON schema in form, or is nested too deeply to be looked at."""
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_BYTES:
            raise RequestError(field, f"{len(schema)} bytes", "is too large", f"pass at most {MAX_GRAMMAR_BYTES} bytes")
        try:
            schema = json.loads(schema)
        except RecursionError:
            remedy = f"nest at most {MAX_GRAMMAR_DEPTH} deep"
            raise RequestError(field, "a schema", "is nested too deeply", remedy) from None
        except ValueError as error:
            raise RequestError(field, schema, f"is not valid JSON ({error})", "pass a schema as JSON") from None
    if not isinstance(schema, Mapping):
        raise RequestError(field, schema, "is not a JSON object", 'pass a schema such as {"type": "object"}')
    level: list[object] = [schema]
    for _ in range(MAX_GRAMMAR_DEPTH + 1):
        below = (list(x.values()) if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list))
        level = [item for items in below for item in items]
        if not level:
            break
    else:
        raise RequestError(field, "a schema", "is nested too deeply", f"nest at most {MAX_GRAMMAR_DEPTH} deep")
    try:
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise RequestError(field, schema, f"is not JSON ({error})", "use what JSON can hold") from None


def checked_number(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """The value as a float; RequestError if it is no number, or outside its limits. True and False are not numbers."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise RequestError(name, value, "is not a number", remedy)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # NaN is not
        raise RequestError(name, value, f"is outside [{low:g}, {high:g}]", remedy)
    return number


def checked_integer(name: str, value: object, low: int, high: int, remedy: str) -> int:
    """The value as an int; RequestError if it is no integer, or outside its limits."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(name, value, "is not an integer", remedy)
    number = int(value)
    if not low <= number <= high:
        raise RequestError(name, value, f"is below {low}" if number < low else f"is above {high}", remedy)
    return number


def sampling_params(**values: object) -> SamplingParams:
    """SamplingParams from a request body or a command line; RequestError names an unknown parameter."""
    known = [entry.name for entry in fields(SamplingParams)]
    for name, value in values.items():
        if name not in known:
            raise RequestError(name, value, "is not a sampling parameter", f"known are {', '.join(known)}")
    return SamplingParams(**values)  # type: ignore[arg-type]
