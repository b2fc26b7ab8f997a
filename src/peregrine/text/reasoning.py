"""What a model writes between <think> and </think>, split from its answer."""

from collections.abc import Iterable


def split_settled(text: str, marks: Iterable[str], final: bool) -> tuple[str, str]:
    """(text, rest): the rest may be the beginning of a mark, and has to wait. `final`: no more text comes."""
    begun = (mark[:n] for mark in marks for n in range(1, len(mark)) if not final)
    cut = len(text) - max((len(part) for part in begun if text.endswith(part)), default=0)
    return text[:cut], text[cut:]


class ReasoningStream:
    """Splits off what a model writes between <think> and </think>."""

    begin, end = "<think>", "</think>"

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ended with <think>, so the text begins inside."""
        self._state = "inside" if opened else "before"
        self._held = ""

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """Add text; returns (reasoning, text) that are settled now."""
        self._held += text
        if self._state == "before":
            bare = self._held.lstrip()
            if bare.startswith(self.begin):
                self._state, self._held = "inside", bare[len(self.begin) :]
            elif final or not self.begin.startswith(bare):
                self._state = "after"
            else:
                return "", ""
        thought = ""
        if self._state == "inside":
            thought, found, rest = self._held.partition(self.end)
            if not found:
                thought, self._held = split_settled(self._held, [self.end], final)
                return thought, ""
            self._state, self._held = "leaving", rest
        if self._state == "leaving":  # the line break after </think> belongs to neither
            self._held = self._held.lstrip("\n")
            if not self._held and not final:
                return thought, ""
            self._state = "after"
        text, self._held = self._held, ""
        return thought, text
