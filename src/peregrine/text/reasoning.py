"""What a model writes between <think> and </think>, split from its answer."""


def partial_suffix(text: str, mark: str) -> int:
    """The length of the longest end of the text that begins the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


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
                keep = 0 if final else partial_suffix(self._held, self.end)
                cut = len(self._held) - keep
                thought, self._held = self._held[:cut], self._held[cut:]
                return thought, ""
            self._state, self._held = "leaving", rest
        if self._state == "leaving":  # the line break after </think> belongs to neither
            self._held = self._held.lstrip("\n")
            if not self._held and not final:
                return thought, ""
            self._state = "after"
        text, self._held = self._held, ""
        return thought, text
