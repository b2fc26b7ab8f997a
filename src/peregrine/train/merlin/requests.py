"""Turns plain stories into chats: a request made from nouns of the story, and the story as its answer.

A model that sees only "Tell me a story about a girl." learns to ignore the request; here the answer depends on it.
A request is a function of the story's text, so a story always gets the same one.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

from peregrine.train.documents import ASSISTANT, USER, Source

REQUESTED = "requested_"  # prefix of the new source's name
STORY_SOURCES = frozenset({"stories_tiny"})
REQUESTED_PER_CENT = 60  # of the stories with enough nouns
REQUESTED_SHARE = 0.5  # of their source's share
OPENING_WORDS, EARLY_SHARE = 40, 0.6
T = TypeVar("T")


def _words(text: str) -> list[str]:
    return text.split()


PEOPLE = _words("""girl boy man woman baby princess prince king queen knight pirate wizard fairy witch farmer baker
sailor fisherman fireman doctor teacher clown dancer singer painter gardener chef hunter policeman astronaut
grandma grandpa robot monster dragon dinosaur unicorn snowman mermaid giant ghost""")
ANIMALS = _words("""dog cat bear bird elephant bunny lion fish mouse worm cow penguin butterfly deer raccoon chicken
puppy ladybug hippo snake kitten dolphin horse caterpillar rabbit duck octopus monkey sheep tiger owl zebra
shark parrot bat ant seal fox spider crow crab goat swan whale bee hedgehog wolf hen squirrel beetle donkey
lizard rooster kangaroo panda frog turtle pig snail giraffe camel koala ostrich mole bug""")
MACHINES = _words("car truck train boat bus plane tractor rocket doll kite balloon")
CHARACTERS = frozenset(PEOPLE + ANIMALS + MACHINES)

STUFF = _words("""soup honey milk bread cheese rice juice candy spaghetti cereal jam toast sugar flour fruit salad pasta
yogurt ice snow sand mud water rain paint glue hay music treasure money""")
FOODS = _words("""cake apple carrot pumpkin sandwich banana cookie egg pie mushroom pizza melon tomato orange pear lemon
peach nut berry cupcake pancake pastry""")
THINGS = _words("""tree ball box toy rock garden forest house sun hole pond slide hill flower book door cave river
stick lake leaf castle swing beach picture table hat party farm jungle barn kite mountain ladder field key
race stone island bell jar blanket bag doll puddle bone library rope gift branch pencil drum nest necklace
dress bike lamp meadow window oven shell bowl mirror coin basket scarf map whistle bush umbrella fire ring
puzzle bench letter crown pot seed crayon candle tower chair feather song vase rainbow cloud storm net sign
star fence spoon closet train wave button lock log wand shirt plate fort cage diamond machine pool trap cup
bucket path anchor moon chest pillow drawing pebble bridge jewel bow phone rose ship bottle gate sandcastle
statue chalk sword medal acorn jacket camera wheel backpack tent clock tractor rocket boat balloon truck car
bus plane park zoo store school""")
UNCOUNTED = frozenset(STUFF)
EATEN = frozenset(STUFF[: STUFF.index("ice")] + FOODS)
NOUNS = frozenset(STUFF + FOODS + THINGS) | CHARACTERS
EATING = frozenset(_words("eat ate eating yummy delicious tasty hungry taste"))
PAST = _words("loved liked wanted found saw lost made ate bought needed built")
PRESENT = dict(zip(PAST, _words("loves likes wants finds sees loses makes eats buys needs builds"), strict=True))
FRAMES = (
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me a short story about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Can you tell me a story about {}?",
    "Could you write a story about {}?",
    "Please tell me a story about {}.",
    "Make up a story about {}.",
    "I would like a story about {}.",
    "I want to hear a story about {}.",
    "Tell me a bedtime story about {}.",
    "tell me a story about {}",
)
LIST_FRAMES = (
    "Can you tell me a story with {}?",
    "Write a story with {} in it.",
    "Tell me a story that has {} in it.",
    "Write a short story with {}.",
)


class Dice:
    """Pseudo-random choices that are a function of a text."""

    def __init__(self, text: str) -> None:
        self.number = int.from_bytes(blake2b(text.encode(), digest_size=32, person=b"request").digest(), "little")

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        self.number, index = divmod(self.number, len(options))
        return options[index]

    def falls(self, per_cent: int) -> bool:
        """True with this probability."""
        return self.pick(range(100)) < per_cent


@dataclass(frozen=True, slots=True)
class Cast:
    """What a story is about."""

    character: str | None  # the first one named in the opening
    things: tuple[str, ...]  # other nouns that occur early and at least twice, most frequent first


def cast_of(story: str) -> Cast:
    """The story's cast."""
    words = re.findall(r"[a-z]+", story.lower())
    first = {word: place for place, word in reversed(list(enumerate(words)))}
    counts = Counter(words)
    character = next((word for word in words[:OPENING_WORDS] if word in CHARACTERS), None)
    things = [
        word
        for word in counts
        if word in NOUNS
        and word != character
        and counts[word] + counts[word + "s"] >= 2
        and first[word] <= EARLY_SHARE * len(words)
    ]
    return Cast(character, tuple(sorted(things, key=lambda word: (-counts[word], first[word]))))


def request_for(story: str) -> str | None:
    """A request that the story answers, or None if the story has too few nouns."""
    cast, dice = cast_of(story), Dice(story)
    things = _draw(cast.things[:5], dice)
    if cast.character is None:
        return _fill(LIST_FRAMES, [_one(thing) for thing in things[:3]], dice) if len(things) >= 2 else None
    if not things:
        return None
    person = _described(cast.character, story, dice)
    clauses = [clause for thing in things if (clause := _clause(thing, story, dice)) is not None]
    if clauses and dice.falls(80):
        return dice.pick(FRAMES).format(f"{person} who {clauses[0]}")
    if dice.falls(35):
        return _fill(LIST_FRAMES, [person, *(_one(thing) for thing in things[:2])], dice)
    return _fill(FRAMES, [person, *(_one(thing) for thing in things[: dice.pick((1, 1, 2))])], dice)


def as_requested(story: str) -> str | None:
    """The story as the answer in a chat, or None if it stays plain."""
    if not Dice("share " + story).falls(REQUESTED_PER_CENT):
        return None
    request = request_for(story)
    return None if request is None else f"{USER}\n{request}\n{ASSISTANT}\n{story}"


def as_plain(story: str) -> str | None:
    """The story, or None if `as_requested` makes it a chat."""
    return story if as_requested(story) is None else None


def with_requests(sources: Sequence[Source]) -> list[Source]:
    """The sources, with each story source split into its plain and its requested stories."""
    result = []
    for source in sources:
        if source.name not in STORY_SOURCES:
            result.append(source)
            continue
        share = source.share * REQUESTED_SHARE
        result.append(replace(source, share=source.share - share, rewrite=as_plain))
        result.append(replace(source, name=REQUESTED + source.name, share=share, rewrite=as_requested))
    return result


def _draw(things: Sequence[str], dice: Dice) -> list[str]:
    left, drawn = list(things), []
    while left:
        drawn.append(dice.pick(left))
        left.remove(drawn[-1])
    return drawn


def _fill(frames: Sequence[str], parts: Sequence[str], dice: Dice) -> str:
    return dice.pick(frames).format(", ".join(parts[:-1]) + " and " + parts[-1])


def _one(noun: str) -> str:
    return noun if noun in UNCOUNTED else _with_article(noun)


def _with_article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeio' or phrase.startswith(('um', 'ug')) else 'a'} {phrase}"


def _described(character: str, story: str, dice: Dice) -> str:
    """The character, sometimes with its name or its adjective."""
    name = re.search(rf"\b{character} (?:named|called) ([A-Z][a-z]+)", story)
    adjective = re.search(rf"\b[Aa]n? ([a-z]+) {character}\b", story)
    if name is not None and dice.falls(20):
        return f"{_with_article(character)} named {name[1]}"
    if adjective is not None and dice.falls(25):
        return _with_article(f"{adjective[1]} {character}")
    return _with_article(character)


def _clause(thing: str, story: str, dice: Dice) -> str | None:
    """A clause such as "loves soup", if the story says so."""
    said = re.search(
        rf"\b({'|'.join(PRESENT)})\b( to [a-z]+(?: with| in| on)?)?(?: (a|an|the|his|her|its|their|some))?"
        rf"(?: [a-z]+,?)?? ({thing}s?)\b",
        story,
    )
    if said is not None:
        verb, action, owner, noun = said.groups()
        known = owner if owner in ("the", "his", "her", "its", "their") else None
        plain = noun != thing or noun in UNCOUNTED
        object_ = f"{known} {noun}" if known and not plain else noun if plain else _one(noun)
        return f"{PRESENT[verb]}{action or ''} {object_}"
    words = frozenset(re.findall(r"[a-z]+", story.lower()))
    if thing in EATEN and words & EATING and (thing in UNCOUNTED or thing + "s" in words):
        return f"{dice.pick(('loves', 'loves', 'likes', 'eats'))} {thing if thing in UNCOUNTED else thing + 's'}"
    return None
