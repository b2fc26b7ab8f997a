"""The device buffers of all seats: every field has a line, or a number, for each seat.

All fields of one type lie one after the other, so whatever requests bring along is written by one copy to the device
and one scatter for each type. Moves and clears of seats are collected, and carried out together before the next batch.
The line after the last seat is always a pad's: a seat is cleared by moving that one into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.spec.seat_entry import SeatEntry, Words

TYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}
WIDE = {torch.int64: np.int64, torch.float32: np.float64}  # as which values are sent to the device
ALIGNED = 16  # words of which every field begins at a multiple
MOVED_AT_ONCE = 16  # lines that exist twice for a moment


@dataclass(frozen=True, slots=True)
class Places:
    """Where a field lies among the words of its type: a seat's first word, and the step to its next ones."""

    kind: torch.dtype
    start: int
    seat_step: int
    step: int

    def of(self, seat: int, column: int, count: int) -> Words:
        """The places of so many of the seat's words, from a column on."""
        begin = self.start + seat * self.seat_step + column * self.step
        return np.arange(begin, begin + count * self.step, self.step)


class SeatBuffers:
    """Buffers of fields, given by the line, or the number, of a pad."""

    def __init__(self, seats: int, pads: dict[str, Tensor], device: torch.device) -> None:
        self.seats, self.device = seats, device
        self.fields: dict[str, Tensor] = {}  # [seats + 1] or [seats + 1, size]
        self._words: dict[torch.dtype, Tensor] = {}
        self._places: dict[str, Places] = {}  # of fields with lines; numbers of one type are found by that type's name
        self._lines: list[Tensor] = []  # [seats + 1, any] all that moves with a request
        self._numbers: dict[torch.dtype, list[str]] = {}
        for kind in TYPES.values():
            self._lay_out(kind, {name: pad for name, pad in pads.items() if pad.dtype == kind})
        self._moved: dict[int, int] = {}  # seats that get the lines of another before the next batch, and which

    def _lay_out(self, kind: torch.dtype, pads: dict[str, Tensor]) -> None:
        """Make the fields of one type."""
        lines = self.seats + 1
        wide = {name: pad for name, pad in pads.items() if pad.dim()}
        names = self._numbers[kind] = [name for name in pads if name not in wide]
        height = up(lines)
        total = sum(up(lines * len(pad)) for pad in wide.values()) + height * len(names)
        words, at = torch.zeros(total, dtype=kind, device=self.device), 0
        for name, pad in wide.items():
            self._places[name] = Places(kind, at, len(pad), 1)
            self.fields[name] = words[at : at + lines * len(pad)].view(lines, len(pad)).copy_(pad)
            self._lines.append(self.fields[name])
            at += up(lines * len(pad))
        columns = words[at:].view(len(names), height)
        columns.copy_(torch.stack([pads[name] for name in names])[:, None])
        self._places[str(kind)] = Places(kind, at, 1, height)
        self.fields |= {name: column[:lines] for name, column in zip(names, columns, strict=True)}
        self._lines.append(columns[:, :lines].T)
        self._words[kind] = words

    def pack(self, entry: SeatEntry) -> dict[str, Words]:
        """What a request's lines begin with, as values of 64 bits; the rest stays a pad's."""
        numbers, lists = entry.numbers(), entry.lists()
        lines: dict[str, Words] = {
            str(kind): np.array([numbers[name] for name in self._numbers[kind]], dtype=wide)
            for kind, wide in WIDE.items()
        }
        lines |= {n: np.array(line, dtype=WIDE[self._places[n].kind]) for n, line in lists.items() if line}
        return lines | {"history": entry.tokens}

    def write(self, entries: Sequence[tuple[int, str, int, Words]]) -> None:
        """Write (seat, field, first column, values) each, by one copy to the device for all."""
        self.settle()
        if not entries:
            return
        places: dict[torch.dtype, list[Words]] = {kind: [] for kind in WIDE}
        values: dict[torch.dtype, list[Words]] = {kind: [] for kind in WIDE}
        for seat, name, column, line in entries:
            at = self._places[name]
            places[at.kind].append(at.of(seat, column, len(line)))
            values[at.kind].append(line.view(np.int64))
        halves = [half for kind in WIDE for half in (places[kind], values[kind])]
        words, first = upload(np.concatenate([array for half in halves for array in half]), self.device), 0
        for kind in WIDE:
            if count := sum(map(len, places[kind])):
                where, given = words[first : first + count], words[first + count : first + 2 * count]
                new = given if kind == torch.int64 else given.view(torch.float64).to(kind)
                self._words[kind].scatter_(0, where, new)
                first += 2 * count

    def write_words(self, name: str, words: Words) -> None:
        """Write single words of a field of whole numbers, (seat, column, value) each, by one copy to the device."""
        self.settle()
        seats, columns, values = words.T
        at = self._places[name]
        places = at.start + seats * at.seat_step + columns * at.step
        where, new = upload(np.concatenate([places, values]), self.device).view(2, -1)
        self._words[at.kind].scatter_(0, where, new)

    def clear(self, seat: int) -> None:
        """Make the seat a pad."""
        self._moved[seat] = self.seats

    def move(self, source: int, target: int) -> None:
        """Give a request another seat and leave a pad behind."""
        self._moved[target], self._moved[source] = self._moved.get(source, source), self.seats

    @property
    def has_moves(self) -> bool:
        """Whether seats were left since the last batch."""
        return bool(self._moved)

    def settle(self) -> None:
        """Carry out the moves and clears since the last batch, all of them together."""
        moved = sorted((source, target) for target, source in self._moved.items() if source != target)
        self._moved.clear()
        if not moved:
            return
        sources, targets = upload(np.array(moved).T.ravel(), self.device).view(2, -1)
        for lines in self._lines:
            if lines is not self.fields["history"]:
                lines.index_copy_(0, targets, lines.index_select(0, sources))
        # Lines of history are long, and what is left in a pad's is never read. No seat is both left and taken here.
        history, used = self.fields["history"], sum(source < self.seats for source, _ in moved)
        for first in range(0, used, MOVED_AT_ONCE):
            some = slice(first, min(first + MOVED_AT_ONCE, used))
            history.index_copy_(0, targets[some], history.index_select(0, sources[some]))


def up(count: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-count // ALIGNED) * ALIGNED
