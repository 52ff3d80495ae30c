"""What is sent back, in the shapes of OpenAI's API: whole answers and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_cli.runtime.request import Completion
from mla_cli.server.job import Part, TokenScore

Bytes = Callable[[int], bytes]


@dataclass
class ChoiceText:
    """One choice as far as it has come."""

    text: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    ended: Completion | None = None

    def add(self, part: Part) -> None:
        """Take a part."""
        self.text.append(part.text)
        self.scores += part.scores
        self.ended = part.ended or self.ended


class Shapes:
    """The answers to one request.

    Args:
        kind: `chat` or `completions`; name: of the request; model: that is served.
        logprobs: whether they were asked for; usage: whether a stream ends with the number of tokens.
        token_bytes: what a token stands for.
    """

    def __init__(
        self, kind: str, name: str, model: str, *, choices: int, logprobs: bool, usage: bool, token_bytes: Bytes
    ) -> None:
        self._chat, self._logprobs, self._usage, self._bytes = kind == "chat", logprobs, usage, token_bytes
        self._common = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{name}",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = choices

    def whole(self, choices: Sequence[ChoiceText], prompt_tokens: int) -> dict[str, Any]:
        """The answer in one piece."""
        found = []
        for index, choice in enumerate(choices):
            assert choice.ended is not None
            text = "".join(choice.text)
            said = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
            )
            entry = {"index": index, **said, "logprobs": self._scores(choice.scores)}
            found.append({**entry, "finish_reason": choice.ended.finish_reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": found, "usage": usage_of(choices, prompt_tokens)}

    def begin(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk({"index": index, "delta": delta}) for index in range(self._choices)]

    def chunks(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The chunks of what has come: one a choice with text, one a choice that has ended."""
        merged: dict[int, ChoiceText] = {}
        for part in parts:
            merged.setdefault(part.choice, ChoiceText()).add(part)
        found = []
        for index, choice in merged.items():
            text = "".join(choice.text)
            scores = self._scores(choice.scores) if choice.scores else None
            ended = None if choice.ended is None else choice.ended.finish_reason
            if not self._chat:
                found.append(self._chunk({"index": index, "text": text, "logprobs": scores}, ended))
                continue
            if text:
                found.append(self._chunk({"index": index, "delta": {"content": text}, "logprobs": scores}))
            if ended is not None:
                found.append(self._chunk({"index": index, "delta": {}}, ended))
        return found

    def end(self, choices: Sequence[ChoiceText], prompt_tokens: int) -> list[dict[str, Any]]:
        """The chunks after all text."""
        if not self._usage:
            return []
        return [{**self._stream(), "choices": [], "usage": usage_of(choices, prompt_tokens)}]

    def _stream(self) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _chunk(self, choice: dict[str, Any], ended: str | None = None) -> dict[str, Any]:
        entry = {"logprobs": None, **choice, "finish_reason": ended}
        return {**self._stream(), "choices": [entry], **({"usage": None} if self._usage else {})}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {"content": [self._chat_score(score) for score in scores], "refusal": None}
        named = [{self._text(token): value for token, value in score.likeliest} for score in scores]
        for score, likeliest in zip(scores, named, strict=True):
            likeliest.setdefault(self._text(score.token), score.logprob)
        return {
            "tokens": [self._text(score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": named,
            "text_offset": [score.start for score in scores],
        }

    def _chat_score(self, score: TokenScore) -> dict[str, Any]:
        likeliest = [self._named(token, value) for token, value in score.likeliest]
        return {**self._named(score.token, score.logprob), "top_logprobs": likeliest}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        content = self._bytes(token)
        return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}

    def _text(self, token: int) -> str:
        """A token as the older interface names it, which has no place for bytes: a part of a character in hexadecimal."""
        content = self._bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def usage_of(choices: Sequence[ChoiceText], prompt_tokens: int) -> dict[str, int]:
    """Tokens of an answer; those of a prompt count once, whatever the number of choices."""
    new = sum(len(choice.ended.token_ids) for choice in choices if choice.ended is not None)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}
