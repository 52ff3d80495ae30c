"""A decoder of ours as a model of lm-evaluation-harness, so that its tasks run on it unchanged.

Import this module only after `tasks.require_harness()`: it needs the `eval` extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mla_cli.console import progress
from mla_cli.errors import InputError, MlaError, UnsupportedError
from mla_cli.evaluation.generation import Prompt, continue_greedily
from mla_cli.evaluation.requests import Request, clip, cut_at_stops, encode_pair, no_prefix, stop_list
from mla_cli.evaluation.scoring import Quantizers, Score, batches, score, token_budget
from mla_cli.model.decoder import Decoder
from mla_cli.model.tokenizer import Tokenizer

# The harness's default for tasks that set no limit.
MAX_NEW_TOKENS = 256

# A generating batch is bound by reading the weights, so it pays to hold more sequences than a scoring batch does.
GENERATION_FACTOR = 8


class HarnessModel(LM):  # type: ignore[misc]
    """What the harness asks of a model, answered by `scoring` and `generation`.

    Args:
        decoder: the model; tokenizer: its own.
        batch_size: sequences of a forward pass; None: as many as suit the device.
        quantizers: run everything through a quantised cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        batch_size: int | None = None,
        quantizers: Quantizers | None = None,
    ) -> None:
        super().__init__()
        self.decoder, self.tokenizer, self.quantizers = decoder, tokenizer, quantizers
        self.batch_size = batch_size
        self.max_length = decoder.spec.max_position_embeddings
        self.prefix_token_id = prefix_token(tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return str(self.tokenizer.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the harness's records."""
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's prompt; without a system message where its template refuses one.

        Without `add_generation_prompt` the prompt ends inside the last message, which the model is to continue.
        """
        try:
            text = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        except InputError:
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy decoding gives."""
        pairs = []
        for instance in requests:
            with _naming_the_item(instance):
                pairs.append(clip(self._request(*instance.args), self.max_length))
        return [(found.logprob, found.greedy) for found in self._scores(pairs, _of_task("scoring", requests))]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once from as much context as fits."""
        windows: list[Request] = []
        owners: list[int] = []
        for owner, instance in enumerate(requests):
            tokens = self.tokenizer.encode(instance.args[0])
            for window in get_rolling_token_windows(tokens, self._prefix(), self.max_length, context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append(Request(tuple(context), tuple(continuation)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, found in zip(owners, self._scores(windows, _of_task("scoring text", requests)), strict=True):
            totals[owner] += found.logprob
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy text after each context, up to the first stop string, which is removed."""
        prompts = []
        for instance in requests:
            with _naming_the_item(instance):
                prompts.append(self._prompt(*instance.args))
        written: dict[int, str] = {}
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index][0].tokens), index))
        budget = GENERATION_FACTOR * token_budget(self.decoder)
        parts = list(
            batches(order, lambda i: len(prompts[i][0].tokens) + prompts[i][0].max_new, self.batch_size, budget)
        )
        for batch in progress(parts, _of_task("generating", requests), unit="batch"):
            ids = continue_greedily(
                self.decoder,
                [prompts[index][0] for index in batch],
                eos_ids=self.tokenizer.eos_ids,
                quantizers=self.quantizers,
            )
            for index, tokens in zip(batch, ids, strict=True):
                written[index] = cut_at_stops(self.tokenizer.decode(tokens), prompts[index][1])
        return [written[index] for index in range(len(prompts))]

    def _prefix(self) -> int:
        if self.prefix_token_id is None:
            raise no_prefix()
        return self.prefix_token_id

    def _request(self, context: str, continuation: str) -> Request:
        encode = self.tokenizer.encode
        return encode_pair(
            encode, lambda text: encode(text, special=False), self.prefix_token_id, context, continuation
        )

    def _scores(self, requests: Sequence[Request], description: str) -> list[Score]:
        running = score(
            self.decoder,
            requests,
            max_length=self.max_length,
            batch_size=self.batch_size,
            quantizers=self.quantizers,
        )
        found = dict(progress(running, description, total=len(requests)))
        return [found[index] for index in range(len(requests))]

    def _prompt(self, context: str, settings: dict[str, Any]) -> tuple[Prompt, list[str]]:
        wanted = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        if wanted.get("do_sample"):
            what = "the task asks for sampled text; only greedy decoding is evaluated"
            raise UnsupportedError(what, fix="evaluate another task")
        stops = stop_list(wanted.get("until"))
        eos = self.tokenizer.special_tokens.get("eos_token")
        stops += [eos] if eos and eos not in stops else []
        max_new = int(wanted["max_gen_toks"])
        room = self.max_length - max_new
        if room < 1:
            raise MlaError(
                f"the task wants {max_new} new tokens, the model holds {self.max_length} in all",
                fix="evaluate another task",
            )

        def finished(ids: Sequence[int]) -> bool:
            text = self.tokenizer.decode(ids)
            return any(stop in text for stop in stops if stop)

        tokens = self.tokenizer.encode(context)[-room:] or [self._prefix()]
        return Prompt(tuple(tokens), max_new, finished), stops


@contextmanager
def _naming_the_item(instance: Instance) -> Iterator[None]:
    """Say which item of the task a failure is about, counted from 1 as the lines of a file are."""
    try:
        yield
    except MlaError as error:
        if instance.doc_id is None:
            raise
        place = f"item {instance.doc_id + 1}" + (f", {error.where}" if error.where else "")
        raise type(error)(error.what, where=place, fix=error.fix) from error


def _of_task(what: str, requests: Sequence[Instance]) -> str:
    names = {instance.task_name for instance in requests}
    return f"{what} {names.pop()}" if len(names) == 1 and None not in names else what


def prefix_token(tokenizer: Tokenizer) -> int | None:
    """The token that stands for an empty context: the tokenizer's BOS, else its EOS (as the harness's HF class)."""
    for name in ("bos_token", "eos_token"):
        text = tokenizer.special_tokens.get(name)
        ids = tokenizer.encode(text, special=False) if text else []
        if len(ids) == 1:
            return ids[0]
    return tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids, default=None)
