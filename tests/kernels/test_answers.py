"""The pool of answers against a plain search, and that it forgets without harm."""

import random

import torch

from peregrine.kernels.round import AnswerPool, add_answer, find_answers
from peregrine.kernels.round.answers import GRAM, MAX_MATCH

SIZE, COUNT = 1 << 16, 5


def agreement(answer: list[int], place: int, text: list[int]) -> int:
    """How many tokens up to a place of an answer equal the last ones of a text."""
    length = 0
    while length < min(MAX_MATCH, place + 1, len(text)) and answer[place - length] == text[-1 - length]:
        length += 1
    return length


def test_the_longest_agreement_is_found_and_continued() -> None:
    draw = random.Random(3)
    answers = [[draw.randrange(9) for _ in range(draw.randrange(1, 30))] for _ in range(12)]
    pool, start = AnswerPool.empty(SIZE, "cpu"), 0
    for answer in answers:
        add_answer(pool, torch.tensor(answer), start)
        start += len(answer) + 1
    hits = 0
    for _ in range(300):
        text = [draw.randrange(9) for _ in range(draw.randrange(1, 25))]
        if draw.random() < 0.7:  # the text goes on as an answer does
            answer = draw.choice(answers)
            text += answer[: draw.randrange(len(answer) + 1)]
        history = torch.tensor([text + [0] * 8])
        tokens, known, agreed = find_answers(pool, history, torch.tensor([len(text) - 1]), COUNT)
        best = max(agreement(a, p, text) for a in answers for p in range(len(a)))
        if agreed[0]:
            assert GRAM <= agreed[0] <= best
            found = [
                a[p + 1 : p + 1 + COUNT] for a in answers for p in range(len(a)) if agreement(a, p, text) == agreed[0]
            ]
            assert tokens[0, : known[0]].tolist() in found
            hits += 1
        else:
            assert known[0] == 0
            assert best < GRAM
    assert hits > 100


def test_places_that_were_overwritten_are_not_believed() -> None:
    pool = AnswerPool.empty(SIZE, "cpu")
    add_answer(pool, torch.tensor([5, 6, 7, 8, 9]), 0)
    history, newest = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([2])
    tokens, known, agreed = find_answers(pool, history, newest, 3)
    assert (tokens[0].tolist()[:2], int(known[0]), int(agreed[0])) == ([8, 9], 2, 3)
    add_answer(pool, torch.tensor([1, 1, 1, 1, 1]), 0)
    assert int(find_answers(pool, history, newest, 3)[1][0]) == 0


def test_what_most_places_share_wins_among_equal_agreements() -> None:
    pool = AnswerPool.empty(SIZE, "cpu")
    for number, last in enumerate((4, 4, 8)):
        add_answer(pool, torch.tensor([1, 2, 3, last]), 10 * number)
    tokens, known, _ = find_answers(pool, torch.tensor([[1, 2, 3]]), torch.tensor([2]), 2)
    assert (int(tokens[0, 0]), int(known[0])) == (4, 1)
