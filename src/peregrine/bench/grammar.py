"""`peregrine bench grammar`: what structured output costs and saves: masks, rounds beside free rows, tokens per second.

Rounds are those of the drafter that is asked for, by default none. Free text is generated without drafts, and so is a
function call; then both with the drafts that a grammar forces (drafter ngram: no head). All texts are greedy. The cost
of a mask depends on the vocabulary, so run it per model; a shape has a random vocabulary of its size. On a GPU rounds
also say for which share of their time the device was idle.

In rounds every constrained row has a schema of its own kind, as requests of different users have. The last figure is of
rows that all write calls with a short string. Random weights fill every string up to its `maxLength`, where masks take
longest: it is the worst case, a model that writes sense ends its strings before.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from peregrine.bench.round import RoundTimer
from peregrine.engine.admission import matcher_limits
from peregrine.grammar import GrammarCompiler
from peregrine.hardware import resolve_device
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from peregrine.spec.round import no_mark
from peregrine.synthetic.shapes import PREFIX
from peregrine.synthetic.vocabulary import grown

Json = dict[str, Any]
FIRST_PARTS = 8  # of rounds, while prompts are still read between them
PROMPT = "The weather in Paris is"
# Rows with one prompt would write one text, and reach the places where masks are slow all at once.
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito")
ROWS = len(CITIES)


def record(**fields: Json) -> Json:
    """The schema of an object with just these properties."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


CALL = record(
    name={"const": "get_current_weather"},
    arguments=record(
        location={"type": "string", "maxLength": 24},
        unit={"enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
)
NUMBER, INTEGER, BOOLEAN = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue", "black", "white"]}, "maxItems": 4}
KINDS: tuple[Json, ...] = (
    CALL,
    record(
        person={"type": "string", "maxLength": 30},
        role={"enum": ["author", "editor"]},
        born={"type": "string", "format": "date"},
    ),
    record(x=NUMBER, y=NUMBER, inside=BOOLEAN),
    record(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, price={**NUMBER, "minimum": 0}, left=INTEGER),
    {"type": "array", "items": INTEGER, "maxItems": 8},
    {"anyOf": [record(error={"type": "string", "maxLength": 40}), record(result=record(id=INTEGER, ok=BOOLEAN))]},
    record(colours=COLOURS, score={**INTEGER, "minimum": 0, "maximum": 100}),
    {"type": "string"},
)
ALIKE = f"{ROWS} alike"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    constrained: tuple[int, ...] = (0, 1, 8)  # rows with a grammar, of 8
    drafts: tuple[int, ...] = (3, 5, 7)  # most forced drafts of a round
    tokens: int = 200  # most of a request
    repeats: int = 7  # the median counts


def run(plan: Plan, options: Json) -> Json:
    """Measure masks, rounds and speeds of one model; speeds where no drafter is asked for, or forced drafts are."""
    model, drafter = str(options.pop("model", "merlin")), str(options.get("drafter", "none"))
    result: Json = {"model": model, "drafter": drafter, "tokens": plan.tokens}
    speeds: list[Json] = []
    with open_model(model, options, drafter) as llm:
        result["vocab_size"] = llm.config.vocab_size
        result["mask_us"] = round(time_masks(llm, requests_of(llm, plan)[1], plan.repeats) * 1e6, 1)
        schemas: dict[object, Sequence[Json]] = {count: KINDS[:count] for count in plan.constrained}
        if ROWS in plan.constrained:
            schemas[ALIKE] = [CALL] * ROWS
        rounds = {what: time_rounds(llm, some, plan) for what, some in schemas.items()}
        result["round_ms"] = {what: round(seconds * 1e3, 3) for what, (seconds, _) in rounds.items()}
        if llm.engine.runner.device.type == "cuda":
            result["device_idle_share"] = {what: round(idle, 4) for what, (_, idle) in rounds.items()}
        if drafter == "none":
            speeds += speeds_of(llm, 0, plan)
    for drafts in filter(None, plan.drafts):
        with open_model(model, options, "ngram", num_drafts=drafts) as llm:
            speeds += speeds_of(llm, drafts, plan)
    for line in speeds:
        line["of_free_text"] = round(line["tokens_per_s"] / speeds[0]["tokens_per_s"], 2)
    return result | {"speeds": speeds}


def open_model(model: str, options: Json, drafter: str, **more: int) -> LLM:
    """The model with rows for the benchmark; a shape gets a vocabulary of its size."""
    sizes: Json = {"row_sizes": (1, ROWS)} if resolve_device(options.get("device", "auto")).type == "cuda" else {}
    llm = LLM(model, **{**sizes, **options, "drafter": drafter, "max_rows": ROWS, **more})
    if model.startswith(PREFIX):
        llm.tokenizer = llm.engine.tokenizer = grown(llm.tokenizer, llm.config.vocab_size)
        llm.engine.grammars = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, llm.config.eos_ids)
    return llm


def requests_of(llm: LLM, plan: Plan) -> tuple[SamplingParams, SamplingParams]:
    """Free text of a fixed length, and a function call."""
    free = SamplingParams(temperature=0, max_tokens=plan.tokens, ignore_eos=True)
    return free, SamplingParams(temperature=0, max_tokens=plan.tokens, json_schema=CALL, stop_token_ids=ends(llm))


def ends(llm: LLM) -> list[int]:
    """A token that ends constrained text where the model has none of its own."""
    return [] if llm.config.eos_ids else sorted(llm.tokenizer.special_ids)[-1:]


def speeds_of(llm: LLM, drafts: int, plan: Plan) -> list[Json]:
    """Tokens per second and per round of one request, without its first token's time: free text, then a call."""
    lines = []
    for what, params in zip(("free text", "function call"), requests_of(llm, plan), strict=True):
        outputs = [llm.generate([PROMPT], params, progress=False)[0] for _ in range(plan.repeats + 1)][1:]
        per_s = statistics.median(1 / output.timing.per_token_s for output in outputs)
        per_round = round(outputs[0].stats.accept_length, 2)
        lines.append({"what": what, "drafts": drafts, "tokens_per_s": round(per_s, 1), "tokens_per_round": per_round})
    return lines


def time_masks(llm: LLM, call: SamplingParams, repeats: int) -> float:
    """The median time of one mask along a function call, in seconds."""
    constraint, grammars = call.constraint, llm.engine.grammars
    assert constraint is not None
    assert grammars is not None
    limits = matcher_limits(call, llm.engine.limits, llm.tokenizer.special_ids)
    tokens = llm.generate([PROMPT], call, progress=False)[0].token_ids
    times = []
    for _ in range(repeats):
        matcher = grammars.matcher(constraint, limits)
        for token in tokens[:-1]:
            began = time.perf_counter()
            matcher.state.compute_bitmask()
            times.append(time.perf_counter() - began)
            matcher.advance([token])
    return statistics.median(times)


def time_rounds(llm: LLM, schemas: Sequence[Json], plan: Plan) -> tuple[float, float]:
    """Seconds per round of eight requests of one length, the first with these schemas; and the device's idle share."""
    free = SamplingParams(temperature=0, max_tokens=plan.tokens, ignore_eos=True)
    lists = [{"type": "array", "items": schema, "minItems": plan.tokens} for schema in schemas]
    asked = [replace(free, ignore_eos=False, json_schema=schema, stop_token_ids=ends(llm)) for schema in lists]
    params = [*asked, *[free] * (ROWS - len(asked))]
    times, idle = [], []
    for _ in range(plan.repeats + 1):  # the first one warms up
        timer = RoundTimer(events=llm.engine.runner.device.type == "cuda")
        llm.engine.runner.mark = timer
        began = time.perf_counter()
        outputs = llm.generate([PROMPT.replace("Paris", city) for city in CITIES], params, progress=False)
        times.append((time.perf_counter() - began) / max(output.stats.rounds for output in outputs))
        if timer.events:
            torch.cuda.synchronize()  # the last round's events
            timer.starts, timer.ends = timer.starts[FIRST_PARTS:], timer.ends[FIRST_PARTS:]
        idle.append(timer.idle_share())
    llm.engine.runner.mark = no_mark
    return statistics.median(times[1:]), statistics.median(idle[1:])


def show(result: Json) -> str:
    """The result as a table."""
    lines = [f"model {result['model']}: a mask takes {result['mask_us']} us at {result['vocab_size']} tokens"]
    idle = {what: f", device idle {share:.1%}" for what, share in result.get("device_idle_share", {}).items()}
    for what, ms in result["round_ms"].items():
        lines.append(f"round of {ROWS} rows, {what} with a grammar: {ms} ms{idle.get(what, '')}")
    if result["speeds"]:
        first = result["speeds"][0]["drafts"]
        title = f"of free text with {first} drafts" if first else "of free text without drafts"
        lines.append(f"{'':15}  {'drafts':>6}  {'tok/s':>8}  {'tok/round':>9}  {title}")
    for line in result["speeds"]:
        figures = f"{line['tokens_per_s']:>8.1f}  {line['tokens_per_round']:>9.2f}  {line['of_free_text']:.2f}x"
        lines.append(f"{line['what']:15}  {line['drafts']:>6}  {figures}")
    return "\n".join(lines)
