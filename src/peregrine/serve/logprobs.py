"""Log-probabilities in the two formats of OpenAI's API: completions and chat."""

from collections.abc import Sequence

from peregrine.engine.output import TokenLogprob
from peregrine.text.stream import Detokenizer
from peregrine.text.tokenizer import Tokenizer


class CompletionLogprobs:
    """`logprobs` of /v1/completions, chunk by chunk; offsets count characters of the choice's whole text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: bool, skip_special: bool) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        context = [] if echoed else prompt
        self._detokenizer = Detokenizer(tokenizer, context, skip_special)
        self._offset = 0
        self._echoed = echoed

    def fields(self, tokens: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] | None) -> dict[str, list[object]]:
        """The tokens of one chunk; the first chunk of an echo begins with the prompt's."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._echoed and prompt is not None:
            self._add(lists, self._prompt[0], None)  # no token comes before it, so it has no probability
            tokens = [*prompt, *tokens]
        for entry in tokens:
            self._add(lists, entry.token_id, entry)
        return lists

    def _add(self, lists: dict[str, list[object]], token_id: int, entry: TokenLogprob | None) -> None:
        lists["tokens"].append(self._tokenizer.token_text(token_id))
        logprob, top = None, None
        if entry is not None:
            logprob = entry.logprob
            top = {self._tokenizer.token_text(i): v for i, v in (*entry.top, (token_id, logprob))}
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(self._detokenizer.push([token_id]))


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """`logprobs` of /v1/chat/completions."""

    def fields(token_id: int, logprob: float) -> dict[str, object]:
        spelled = list(tokenizer.spelling(token_id))
        return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": spelled}

    content = [{**fields(t.token_id, t.logprob), "top_logprobs": [fields(i, v) for i, v in t.top]} for t in tokens]
    return {"content": content, "refusal": None}
