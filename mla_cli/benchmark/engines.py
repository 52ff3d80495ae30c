"""What is timed: our runtime, with latents or with a standard cache, and transformers, each behind the same few calls.

Decode is timed on a cache that is filled, not computed: what it holds does not change how long a step takes.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_cli.errors import MlaError, first_line, is_out_of_memory
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder
from mla_cli.runtime.batch import prefill


class BenchEngine(Protocol):
    """One way to run a model.

    Attributes:
        name: `mla`, `standard` or `transformers`. dtype: computed in.
        kv_dtype: what the cache is stored as (of layers that differ, all, joined by +; rotary keys aside).
        weight_bytes: read by a step.
    """

    name: str
    dtype: str
    kv_dtype: str
    weight_bytes: int

    def fill(self, batch: int, context: int, room: int) -> None:
        """Have a cache that holds `context` tokens a sequence, and room for so many in all."""

    def step(self) -> None:
        """One token more a sequence: forward pass, scores, most likely tokens."""

    def cache_bytes(self) -> int:
        """Bytes of what the cache holds now, which the next step reads."""

    def prefill(self, prompts: Tensor) -> None:
        """From prompts `[B, T]` to the first token of each, with a cache of its own."""

    def release(self) -> None:
        """Drop the cache."""


class OurEngine:
    """A decoder in our runtime."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        quantizers: tuple[LatentQuantizer | None, ...] | None,
        cache_dtype: torch.dtype | None,
    ) -> None:
        self.name, self._decoder = name, decoder
        self.dtype = _name(decoder.dtype)
        self._make_cache = partial(decoder.make_cache, quantizers=quantizers, dtype=cache_dtype)
        kinds = {None if each is None else each.dtype for each in quantizers or (None,)}
        plain = _name(cache_dtype or decoder.dtype)
        self.kv_dtype = "+".join(sorted(kind or plain for kind in kinds))
        tied = decoder.spec.tied
        self.weight_bytes = sum(
            tensor.nbytes for name, tensor in decoder.state_dict().items() if tied or "embed_tokens" not in name
        )
        self.tokens = torch.zeros(1, 1, dtype=torch.int64)  # [B, 1] the last ones
        self._cache: Cache | None = None

    @torch.inference_mode()
    def fill(self, batch: int, context: int, room: int) -> None:
        device = self._decoder.device
        cache = self._make_cache(batch, room)
        ends = torch.full((batch,), context)
        cache.begin(room, torch.full((batch,), room))  # all of it now, so that no timed step makes room
        cache.advance(ends)
        generator = torch.Generator(device=device).manual_seed(0)
        for layer in cache.layers:
            for store in layer.stores:
                for name in store.parts:
                    randomize(getattr(store, name), generator)
        self._cache = cache
        self.tokens = torch.randint(0, self._decoder.spec.vocab_size, (batch, 1), device=device, generator=generator)

    @torch.inference_mode()
    def step(self) -> None:
        hidden = self._decoder(self.tokens, self._cache)  # [B, 1, D]
        self.tokens = self._decoder.logits(hidden[:, -1]).argmax(dim=-1, keepdim=True)
        _wait(self.tokens)

    def cache_bytes(self) -> int:
        assert self._cache is not None
        return self._cache.bytes_per_token() * int(self._cache.host_lengths.sum())

    @torch.inference_mode()
    def prefill(self, prompts: Tensor) -> None:
        for prompt in prompts.tolist():  # each on its own, as the generator reads them
            _wait(prefill(self._decoder, self._make_cache(1, len(prompt)), prompt).argmax(dim=-1))

    def release(self) -> None:
        self._cache = None


class TransformersEngine:
    """A model in transformers, as its `generate` runs it: the default attention and the default cache.

    Raises:
        MlaError: transformers is missing, or cannot run the model.
    """

    name = "transformers"

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
            from transformers.utils import logging
        except ImportError as error:
            raise MlaError("transformers is not installed", fix="pip install transformers") from error
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.dtype = self.kv_dtype = _name(dtype)
        self._make_cache: Any = transformers.DynamicCache
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            self._model = model.to(device).eval()
            self._config = self._model.config
            known = inspect.signature(self._model.forward).parameters
            self._cache_name = "cache" if "cache" in known else "past_key_values"  # as it was called before
            self.fill(1, 1, 2)
            self.step()
            self.cache_bytes()
        except Exception as error:  # of any kind: of a version that is too old, or of a model that it does not know
            if is_out_of_memory(error):
                raise
            raise MlaError(f"it cannot run the model: {first_line(error)}", where=folder) from error
        self.release()
        embedding = self._model.get_input_embeddings().weight
        read = (p for p in self._model.parameters() if self._config.tie_word_embeddings or p is not embedding)
        self.weight_bytes = sum(p.nbytes for p in read)

    @torch.inference_mode()
    def fill(self, batch: int, context: int, room: int) -> None:
        model, config = self._model, self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        generator = torch.Generator(device=model.device).manual_seed(0)
        self._cache = self._make_cache(config=config)
        for layer in range(config.num_hidden_layers):
            shape = (batch, heads, context, width)
            pair = [torch.randn(shape, dtype=model.dtype, device=model.device, generator=generator) for _ in range(2)]
            self._cache.update(*pair, layer)
        self._tokens = torch.randint(0, config.vocab_size, (batch, 1), device=model.device, generator=generator)

    @torch.inference_mode()
    def step(self) -> None:
        out = self._forward(self._tokens, self._cache)
        self._tokens = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        _wait(self._tokens)

    def _forward(self, tokens: Tensor, cache: Any) -> Any:
        return self._model(tokens, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)

    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._cache.layers for tensor in (layer.keys, layer.values))

    @torch.inference_mode()
    def prefill(self, prompts: Tensor) -> None:
        out = self._forward(prompts.to(self._model.device), self._make_cache(config=self._config))
        _wait(out.logits[:, -1].argmax(dim=-1))

    def release(self) -> None:
        self._cache = None


def randomize(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a part of a cache, codes or numbers, with what no step stumbles over."""
    if tensor.dtype in (torch.int8, torch.uint8):
        tensor.random_(0, 128, generator=generator)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(0, 64, generator=generator)
    else:
        tensor.normal_(generator=generator).abs_().mul_(0.01)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
