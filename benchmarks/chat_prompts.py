"""Chat prompts on many topics, to train a draft head for a chat model on the model's own answers, or to measure one.

Templates are filled with topics, things to program, sentences and numbers. Topics and tasks of `--held-out` are others
than those for training. Chats of text shards (turns after <|user|> lines) may join in, and questions that the model
asks itself: its template is rendered up to the user's turn, and it goes on from there.

    python benchmarks/chat_prompts.py --count 30000 --out chats.jsonl [--chats SHARD.txt.xz ... --chats-count 6000]
    python benchmarks/chat_prompts.py --count 30000 --out chats.jsonl --ask smollm2 --asked-count 20000 --device cuda
    python benchmarks/chat_prompts.py --count 64 --held-out --out held-out.jsonl
"""

import argparse
import json
import random
from pathlib import Path

from peregrine import LLM, SamplingParams
from peregrine.text.chat import render_chat
from peregrine.text.chat_parts import MARK
from peregrine.train.documents import ASSISTANT, USER, read_texts

MAX_QUESTION = 110  # tokens of a question that the model asks itself; longer ones are left out

TOPICS = """
photosynthesis; black holes; the water cycle; volcanoes; earthquakes; plate tectonics; gravity; magnetism; atoms;
the periodic table; DNA; evolution; the human heart; the immune system; vaccines; sleep; dreams; nutrition;
vitamins; exercise; yoga; meditation; stress; time management; public speaking; job interviews; writing a resume;
negotiation; teamwork; leadership; remote work; small businesses; marketing; budgeting; saving money; credit cards;
inflation; interest rates; the stock market; insurance; taxes; democracy; the French Revolution; ancient Egypt; the
Roman Empire; the Renaissance; the Industrial Revolution; World War II; the Cold War; the space race; the printing
press; the internet; smartphones; social media; computer viruses; passwords; encryption; cloud computing; artificial
intelligence; machine learning; robots; self-driving cars; electric cars; solar power; wind energy; nuclear energy;
climate change; recycling; plastic pollution; rainforests; coral reefs; deserts; oceans; rivers; mountains;
glaciers; weather forecasts; thunderstorms; rainbows; the moon; Mars; the sun; comets; telescopes; satellites;
airplanes; trains; bicycles; ships; bridges; skyscrapers; museums; libraries; schools; universities; learning a
language; reading books; writing a novel; poetry; Shakespeare; fairy tales; science fiction; movies; photography;
painting; sculpture; music theory; the piano; the guitar; jazz; opera; dancing; theater; cooking rice; baking bread;
making pizza; soups; salads; breakfast; coffee; tea; chocolate; cheese; vegetarian food; spices; gardening; roses;
houseplants; trees; bees; butterflies; ants; spiders; sharks; whales; dolphins; penguins; owls; eagles; parrots;
dogs; cats; horses; cows; elephants; lions; wolves; bears; pandas; snakes; frogs; dinosaurs; fossils; camping;
hiking; fishing; swimming; running; soccer; basketball; tennis; chess; board games; video games; puzzles; knitting;
woodworking; home repair; moving to a new city; renting an apartment; cleaning the house; laundry; pets for
children; babysitting; birthday parties; weddings; holidays; Christmas; New Year; gift ideas; traveling by train;
packing a suitcase; airports; hotels; Paris; London; New York; Tokyo; Rome; India; China; Brazil; Australia; Africa;
Canada; fractions; percentages; prime numbers; algebra; geometry; statistics; probability; graphs; the Pythagorean
theorem; binary numbers; sorting algorithms; databases; Python programming; HTML; spreadsheets; operating systems;
open source software; first aid; headaches; colds; allergies; teeth; eyes; the brain; memory; emotions; friendship;
honesty; kindness; courage; happiness; habits; goals; motivation
"""
HELD_OUT_TOPICS = """
tides; the northern lights; caves; beekeeping; sourdough; origami; sailing; the violin; sign language; the Silk
Road; the Vikings; lighthouses; clocks; maps; money; glass; paper; bicycles in cities; noise; migraine; public
transport; a school garden; second-hand clothes; volunteering; astronomy for children; typewriters; windmills; the
Great Wall; marathons; board meetings; user interfaces; version control; regular expressions; compost; hedgehogs;
octopuses; pumpkins; Norway; Peru; Kenya
"""
ABOUT = """
What is {0}?; Explain {0} in simple terms.; Explain {0} to a ten-year-old.; Tell me about {0}.; Write a short
paragraph about {0}.; Give me five facts about {0}.; List three common misunderstandings about {0}.; Why is {0}
important?; How did people think about {0} in the past?; What are the advantages and disadvantages of {0}?; Write a
poem about {0}.; Write a haiku about {0}.; Write a short story in which {0} plays a role.; Give me tips for someone
who is new to {0}.; I want to learn more about {0}. Where should I start?; Make a list of ten words related to {0}.;
Write a quiz question with four answers about {0}, and mark the right one.; Write a dialogue between a teacher and a
student about {0}.; Write an email to a friend about {0}.; Write a short speech about {0}.; Write three titles for
an article about {0}.; Write a tweet about {0}.; Summarize what you know about {0} in two sentences.; What questions
do people often ask about {0}? Answer one of them.; Describe {0} to someone who has never heard of it.; Create a
short lesson plan about {0}.; What will {0} be like in fifty years?; Write an introduction for an essay on {0}.; How
does {0} affect daily life?; Compare {0} and {1}.; What do {0} and {1} have in common?; Which is harder to explain,
{0} or {1}, and why?; Write a story that connects {0} with {1}.; Put these in alphabetical order and explain each:
{0}, {1}, {2}.; Is it true that {0} is easy to understand? Give your opinion.; What would happen without {0}?; Give
me a step-by-step plan for a weekend project about {0}.; Write a JSON object that describes {0}.; Make a table in
Markdown with three rows about {0}.; Write a product description that mentions {0}.
"""
HELD_OUT_ABOUT = """
Could you help me understand {0}?; Write a diary entry that mentions {0}.; Name four jobs that involve {0}.; What
surprised scientists about {0}?; Plan a one-hour workshop on {0}.; Write a friendly note to a neighbour about {0}.
"""
CODE = """
reverses a string; checks whether a number is prime; computes the factorial of a number; counts the vowels of a
text; finds the largest number in a list; merges two sorted lists; removes duplicates from a list; sorts a list of
names by length; computes the Fibonacci numbers; checks whether a word is a palindrome; converts Celsius to
Fahrenheit; reads a CSV file and sums a column; counts how often each word occurs in a text; flattens a nested list;
computes the average of numbers; finds the second largest value; swaps keys and values of a dictionary; generates a
random password; validates an email address; formats a date; downloads a web page; draws a triangle of stars;
computes the greatest common divisor; transposes a matrix; implements a stack; implements a queue; searches a sorted
list by bisection; writes a list to a JSON file; prints a multiplication table; rolls two dice
"""
HELD_OUT_CODE = """
finds the longest word of a sentence; turns a Roman numeral into a number; checks whether brackets are balanced;
rotates a list by n places; groups words by their first letter; computes the median
"""
ASK_CODE = """
Write a {1} function that {0}.; How do I write {1} code that {0}?; Write a {1} program that {0}, and explain it.;
Show me a short {1} example that {0}.; Write a test for a {1} function that {0}.
"""
THINGS = """
bank account; shopping cart; library of books; to-do list; address book; parking garage; chess board; playlist; recipe
collection; weather station; class of students; hotel with rooms; inventory of a shop; calendar of events; text
adventure; calculator; stopwatch; elevator; vending machine; game of tic-tac-toe; deck of cards; train timetable; file
cache; message queue; log file; family tree; graph of cities; matrix; polynomial; fraction; date range; temperature
sensor; URL shortener; voting system; password store; photo album; music player; quiz; diary; budget
"""
HELD_OUT_THINGS = """
ticket counter; zoo with animals; traffic light; crossword; warehouse robot; voucher system; sensor network; seed bank
"""
ASK_THING = """
Write a {1} class for a {0} with methods to add, remove and find entries.; Design a small {1} program for a {0}.; Write
{1} code that saves a {0} to a JSON file and loads it again.; Write a command-line tool in {1} for a {0}.; Write unit
tests for a {1} class that models a {0}.; Model a {0} with {1} data structures, and explain your choices.; Write a {1}
function that validates the data of a {0} and raises clear errors.; Here is a {0} as a {1} class with one bug. Write
it, and then the corrected version.; Write an SQL schema for a {0}, and three queries.; Write {1} code that prints a
{0} as a table.; Refactor this idea into clean {1} code: a {0} that notifies listeners about changes.; Add type hints
and docstrings to a {1} class for a {0}.
"""
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C")
SENTENCES = """
I can't come to the meeting because my train is late; the food was good but we waited for an hour; she don't like
when people talks too loud; our team has finished the report two days early; please send me the documents as soon as
you can; the new phone is fast, but its battery is weak; he said that he will visit us in the summer; the movie was
boring and far too long; we are looking for somebody who can repair the roof; this book changed how I think about
work; my neighbour plays the drums every night; the hotel room was clean and the staff were very friendly
"""
HELD_OUT_SENTENCES = """
the parcel arrived with a broken corner; our teacher were ill, so we goes home; thank you for the quick help with my
invoice; the soup was cold and nobody apologised
"""
REWRITE = """
Rewrite this in a formal style: {0}.; Rewrite this more briefly: {0}.; Correct the grammar: {0}.; Is this sentence
positive or negative? "{0}"; Translate into French: {0}.; Translate into Spanish: {0}.; Turn this into a question:
{0}.; Continue this text with three sentences: {0}.; Explain what this means: "{0}"; Write a polite reply to this
message: {0}.; Rewrite this as a news headline: {0}.; Replace as many words as you can: {0}.
"""
SUMS = """
What is {0} + {1}?; What is {0} times {1}?; I have {0} apples and buy {1} more. How many do I have?; A train drives
{0} km in {1} hours. How fast is it?; What is {1} percent of {0}?; Which is larger, {0} or {1}? Explain.; A box
holds {0} books. How many books are in {1} boxes? Think step by step.
"""


def split(text: str) -> list[str]:
    """Entries between semicolons, which may run over line ends."""
    return [" ".join(entry.split()) for entry in text.split(";")]


def make_prompt(dice: random.Random, held_out: bool, code: int) -> str:
    """One prompt, `code` in a hundred about code; half of those held out have a template that training has as well."""
    topics = split(HELD_OUT_TOPICS if held_out else TOPICS)
    about = split(HELD_OUT_ABOUT if held_out and dice.random() < 0.5 else ABOUT)
    if dice.randrange(100) < code:
        tasks, things = (HELD_OUT_CODE, HELD_OUT_THINGS) if held_out else (CODE, THINGS)
        ask, of = dice.choice(((ASK_CODE, tasks), (ASK_THING, things)))
        return dice.choice(split(ask)).format(dice.choice(split(of)), dice.choice(LANGUAGES))
    match dice.choices(("about", "rewrite", "sum"), (80, 14, 6))[0]:
        case "about":
            return dice.choice(about).format(*dice.sample(topics, 3))
        case "rewrite":
            sentence = dice.choice(split(HELD_OUT_SENTENCES if held_out else SENTENCES))
            return dice.choice(split(REWRITE)).format(sentence[0].upper() + sentence[1:])
        case _:
            return dice.choice(split(SUMS)).format(dice.randint(2, 900), dice.randint(2, 60))


def questions(path: Path) -> list[str]:
    """The first user's turn of every chat in a shard."""
    texts = (text for text in read_texts(path) if text.startswith(USER) and ASSISTANT in text)
    return [text.removeprefix(USER).partition(ASSISTANT)[0].strip() for text in texts]


def own_questions(model: str, count: int, seed: int, device: str) -> list[str]:
    """Questions that a chat model asks itself, at temperature 1; a few of `count` do not end and are left out."""
    with LLM(model, drafter="none", device=device, max_len=512) as llm:
        opening = render_chat(llm.tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)[0]
        ids = llm.tokenizer.encode(opening, add_special=False)
        seeds = range(seed * count, (seed + 1) * count)
        params = [SamplingParams(temperature=1.0, seed=each, max_tokens=MAX_QUESTION) for each in seeds]
        outputs = llm.generate([ids] * count, params)
    return [output.text.strip() for output in outputs if output.finish_reason == "stop" and output.text.strip()]


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30_000)
    parser.add_argument("--held-out", action="store_true", help="topics and tasks that training does not have")
    parser.add_argument("--code", type=int, default=15, metavar="PERCENT", help="of the prompts are about code")
    parser.add_argument("--chats", nargs="*", type=Path, default=[], help="shards whose first questions join in")
    parser.add_argument("--chats-count", type=int, default=2000, help="of each shard")
    parser.add_argument("--ask", metavar="MODEL", help="a chat model whose own questions join in")
    parser.add_argument("--asked-count", type=int, default=20_000, help="questions it is to ask")
    parser.add_argument("--device", default="auto", help="that it asks them on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dice = random.Random(args.seed + args.held_out)
    prompts: dict[str, None] = {}  # in order, each once
    for _ in range(20 * args.count):
        if len(prompts) == args.count:
            break
        prompts[make_prompt(dice, args.held_out, args.code)] = None
    for path in args.chats:
        found = questions(path)
        prompts |= dict.fromkeys(dice.sample(found, min(len(found), args.chats_count)))
    if args.ask is not None:
        prompts |= dict.fromkeys(own_questions(args.ask, args.asked_count, args.seed, args.device))
    entries = list(prompts)
    dice.shuffle(entries)
    lines = [json.dumps({"messages": [{"role": "user", "content": entry}]}) for entry in entries]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(entries)} prompts are in {args.out}")


if __name__ == "__main__":
    main()
