"""Where one request stands in its grammar, and which tokens are legal at each node of its window.

Masks are bits by token id. The library's mask says which tokens continue the text, and has the model's end tokens
where the text may end. Three rules are added here:

- end tokens that the request brings itself are legal where the model's are;
- before `min_tokens` tokens no stop token is legal, unless nothing else is: a complete text must end;
- while the grammar has not begun (`begins_after`), every token but a stop token is legal.

A mask is a function of the grammar and of the tokens before it alone. So a token does not depend on how windows fell.
"""

from collections.abc import Iterator, Sequence
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

    @property
    def is_whole_chain(self) -> bool:
        """Whether each node is behind the one before it, and all may be accepted."""
        return all(self.offered[1:]) and all(parent == node for node, parent in enumerate(self.parents[1:]))

    def children(self) -> list[list[int]]:
        """The offered children of each node."""
        of: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            if self.offered[node]:
                of[self.parents[node]].append(node)
        return of


@dataclass(frozen=True, slots=True)
class Stand:
    """A legal node of a window, with the nodes behind it if they are what the grammar forces."""

    node: int
    depth: int  # of the node, and of the window's root 0
    state: Any  # the library's matcher there
    forced: list[int]  # the tokens that come next, as far as there is no choice
    num_tokens: int  # before it
    drafts: list[int]  # of the nodes behind it, one behind the other


class Matcher:
    """A grammar's state after the tokens of one request."""

    def __init__(self, template: Any, vocab_size: int, eos_ids: frozenset[int], limits: MatcherLimits) -> None:
        self.error: str | None = None  # why no token is legal any more
        self._template, self._state = template, template.deep_copy()
        self._limits, self._more_ends = limits, limits.end_ids - eos_ids
        self._everything = all_ones(vocab_size)
        self._tokens: list[int] = []  # taken so far, those before the grammar's beginning included
        self._begun = limits.begins_after is None
        self._run: tuple[int, list[int]] = 0, []  # a forced run and where it begins: a long one is computed once

    @property
    def state(self) -> Any:
        """The library's matcher at the node where a walk stands."""
        return self._state

    def advance(self, tokens: Sequence[int]) -> int:
        """Take the tokens of a round; returns how many of them are legal. If not all are, `error` says why."""
        legal = 0
        if self._begun and self._limits.end_ids.isdisjoint(tokens):
            legal = self._state.try_consume_tokens(list(tokens))
            self._tokens += tokens[:legal]
        for token in tokens[legal:]:
            if token in self._limits.end_ids and self._begun and self._state.is_accepting():
                return legal + 1  # it ends the request: whatever follows is dropped
            if not self._take(token):
                self.error = self.error or "no token can continue the text within the limits of its grammar"
                return legal
            legal += 1
        return legal

    def walk(self, window: Window, words: Words, most: int) -> Iterator[Stand]:
        """The legal nodes of a window, each with the library's state there, for its mask to be computed into `words`.

        Nodes that no legal text reaches are passed over: the target never chooses their tokens, whatever their masks.
        `most` is how many forced tokens are wanted. The library itself walks along drafts that are all forced.
        """
        drafts = list(window.tokens[1:])
        run = self.forced(most + len(drafts)) if drafts and window.is_whole_chain else []
        if len(run) > len(drafts) and run[: len(drafts)] == drafts:
            yield Stand(0, 0, self._state, run, len(self._tokens), drafts)
        else:
            yield from self._visit(0, 0, window, window.children(), words, most)

    def _visit(
        self, node: int, depth: int, window: Window, children: list[list[int]], words: Words, most: int
    ) -> Iterator[Stand]:
        if self._begun:
            # The root's mask is computed on the matcher's own state, where the library keeps what it works out.
            state = self._state.deep_copy() if node else self._state
            yield Stand(node, depth, state, self.forced(most), len(self._tokens), [])
        else:
            words[node] = self._everything
            set_bits(words[node], self._limits.stop_ids, False)
        for child in children[node]:
            begun, token = self._begun, window.tokens[child]
            if token in self._limits.end_ids or not self._take(token):
                continue
            yield from self._visit(child, depth + 1, window, children, words, most)
            self._tokens.pop()
            if begun:
                self._state.rollback(1)
            self._begun = begun

    def finish(self, at: Stand, words: Words) -> None:
        """Add the request's own rules to a mask that the library has computed."""
        masks = words[at.node : at.node + 1 + len(at.drafts)]
        if at.state.is_error():
            masks[:] = 0
            self.error = at.state.get_error()
            if at.node == 0:
                self._restore()
            return
        if self._more_ends and at.state.is_accepting():  # then nothing is forced
            set_bits(masks[0], self._more_ends, True)
        for mask in masks[: max(0, self._limits.min_tokens - at.num_tokens)]:
            kept = mask.copy()
            set_bits(mask, self._limits.stop_ids, False)
            if not mask.any():
                mask[:] = kept

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice and no further than `most`."""
        if not self._begun or not most:
            return []
        begin, run = self._run
        if not (run and begin <= (here := len(self._tokens)) < begin + len(run)) or (
            self._tokens[begin:here] != run[: here - begin]
        ):
            begin, run = self._run = len(self._tokens), list(self._state.compute_ff_tokens())
        return run[len(self._tokens) - begin :][:most]

    def _take(self, token: int) -> bool:
        """Add a token if it is legal."""
        if not self._begun:
            self._begun = token == self._limits.begins_after
        elif self._state.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        return True

    def _restore(self) -> None:
        """A matcher that ran into a limit is of no more use: begin again and take the same tokens."""
        tokens, after = self._tokens, self._limits.begins_after
        if after is not None:
            tokens = tokens[tokens.index(after) + 1 :]
        self._state = self._template.deep_copy()
        self._state.consume_tokens(tokens)


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
