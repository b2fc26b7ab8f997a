"""Where one request stands in its grammar, and which tokens are legal at each node of its window.

Masks are bits by token id. The library's mask says which tokens continue the text, and has the model's end tokens
where the text may end. Three rules are added here:

- end tokens that the request brings itself are legal where the model's are;
- before `min_tokens` tokens no stop token is legal, unless nothing else is: a complete text must end;
- while the grammar has not begun (`begins_after`), every token but a stop token is legal.

A mask is a function of the grammar and of the tokens before it alone. So a token does not depend on how windows fell.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]  # [T, words]: masks of a window's nodes, token v at bit v % 32 of word v // 32
WORD = 32


@dataclass(frozen=True, slots=True)
class MatcherLimits:
    """What a request asks beside its grammar."""

    end_ids: frozenset[int]  # special tokens that end it
    stop_ids: frozenset[int]  # every token that ends it
    min_tokens: int
    begins_after: int | None  # the grammar holds after the first token with this id; None: at once


@dataclass(frozen=True, slots=True)
class Window:
    """The drafts of one request: node 0 is its newest token, parents come before children."""

    tokens: Sequence[int]  # [T]
    parents: Sequence[int]  # [T]
    offered: Sequence[int]  # [T]: 1 if the node may be accepted

    def children(self) -> list[list[int]]:
        """The offered children of each node."""
        of: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            if self.offered[node]:
                of[self.parents[node]].append(node)
        return of


@dataclass(frozen=True, slots=True)
class Stand:
    """A legal node of a window, where its matcher stands now."""

    node: int
    depth: int  # of the node; the window's root has 0
    forced: list[int]  # the tokens that come next, as far as there is no choice


class Matcher:
    """A grammar's state after the tokens of one request."""

    def __init__(self, template: Any, vocab_size: int, eos_ids: frozenset[int], limits: MatcherLimits) -> None:
        self.error: str | None = None  # why no token is legal any more
        self._template, self._state = template, template.deep_copy()
        self._limits, self._more_ends = limits, limits.end_ids - eos_ids
        self._everything = all_ones(vocab_size)
        self._tokens: list[int] = []  # taken so far, those before the grammar's beginning included
        self._begin = 0 if limits.begins_after is None else None  # how many are before it; None: it has not begun
        self._run: tuple[int, list[int]] = 0, []  # a forced run and where it begins: a long one is computed once

    @property
    def state(self) -> Any:
        """The library's matcher, at the node where a walk stands."""
        return self._state

    def advance(self, tokens: Sequence[int]) -> int:
        """Take the tokens of a round; returns how many of them are legal. If not all are, `error` says why."""
        legal = 0
        if self._begin is not None and self._limits.end_ids.isdisjoint(tokens):
            legal = self._state.try_consume_tokens(list(tokens))
            self._tokens += tokens[:legal]
        for token in tokens[legal:]:
            if token in self._limits.end_ids and self._begin is not None and self._state.is_accepting():
                return legal + 1  # it ends the request: whatever follows is dropped
            if not self._take(token):
                self.error = self.error or "no token can continue the text within the limits of its grammar"
                return legal
            legal += 1
        return legal

    def walk(self, window: Window, words: Words, most: int) -> Generator[Stand]:
        """Stand at the legal nodes of a window, one after the other by depth, and at its root again in the end.

        Nodes that no legal text reaches are passed over: the target never chooses their tokens, whatever their masks.
        `most` is how many forced tokens are wanted. The caller computes each node's mask with `state`, then calls
        `finish`; but where the grammar has not begun, the mask is written here, and the node is not told of.
        """
        root, children = len(self._tokens), window.children()
        level: list[tuple[int, list[int]]] = [(0, [])]  # nodes of one depth, with the drafts that lead there
        try:
            while level:
                reached = []
                for node, drafts in level:
                    if not self._go(root, drafts):
                        continue
                    reached.append((node, drafts))
                    if self._begin is None:
                        words[node] = self._everything
                        set_bits(words[node], self._limits.stop_ids, False)
                        continue
                    yield Stand(node, len(drafts), self.forced(most))
                level = [
                    (child, [*drafts, window.tokens[child]]) for node, drafts in reached for child in children[node]
                ]
        finally:
            self._go(root, [])

    def _go(self, root: int, drafts: list[int]) -> bool:
        """Take back what is behind the root, as far as it is not the first of these drafts, and take them; if not all
        of them are legal, fewer."""
        here, same = self._tokens[root:], 0
        while same < min(len(here), len(drafts)) and here[same] == drafts[same]:
            same += 1
        self._take_back(root + same)
        return all(token not in self._limits.end_ids and self._take(token) for token in drafts[same:])

    def finish(self, node: int, words: Words) -> None:
        """Add the request's own rules to the mask that the library has computed at this node, where the matcher is."""
        mask = words[node]
        if self._state.is_error():
            mask[:] = 0
            self.error = self._state.get_error()
            self._restore()
            return
        if self._more_ends and self._state.is_accepting():
            set_bits(mask, self._more_ends, True)
        if len(self._tokens) < self._limits.min_tokens:
            kept = mask.copy()
            set_bits(mask, self._limits.stop_ids, False)
            if not mask.any():
                mask[:] = kept

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice and no further than `most`."""
        if self._begin is None or not most:
            return []
        begin, run = self._run
        if not (run and begin <= (here := len(self._tokens)) < begin + len(run)) or (
            self._tokens[begin:here] != run[: here - begin]
        ):
            begin, run = self._run = len(self._tokens), list(self._state.compute_ff_tokens())
        return run[len(self._tokens) - begin :][:most]

    def _take(self, token: int) -> bool:
        """Add a token if it is legal."""
        if self._begin is None:
            self._begin = len(self._tokens) + 1 if token == self._limits.begins_after else None
        elif self._state.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        return True

    def _take_back(self, length: int) -> None:
        """Take back all tokens but this many."""
        if self._begin is not None and length < len(self._tokens):
            self._state.rollback(len(self._tokens) - max(length, self._begin))
            self._begin = self._begin if length >= self._begin else None
        if length < self._run[0]:  # it followed from a draft
            self._run = 0, []
        del self._tokens[length:]

    def _restore(self) -> None:
        """A matcher that ran into a limit is of no more use: begin again and take the same tokens."""
        self._state = self._template.deep_copy()
        self._state.consume_tokens(self._tokens[self._begin :])


def all_ones(vocab_size: int) -> Words:
    """The mask that allows every token."""
    words = np.full(-(-vocab_size // WORD), 0xFFFFFFFF, dtype=np.uint32)
    if vocab_size % WORD:
        words[-1] = (1 << vocab_size % WORD) - 1
    return words


def set_bits(mask: Words, ids: frozenset[int], legal: bool) -> None:
    """Make tokens legal or illegal in one mask."""
    for token in ids:
        bit = np.uint32(1 << token % WORD)
        mask[token // WORD] = mask[token // WORD] | bit if legal else mask[token // WORD] & ~bit
