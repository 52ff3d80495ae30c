"""A byte tokenizer for tiny models, and a decoder that says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_cli.model.cache import Cache
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec
from mla_cli.model.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import save_tiny

PAD, BOS, EOS = 0, 1, 2
VOCAB = 272  # three special tokens, 256 bytes, and rows that no token uses
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_ids(text: str | bytes) -> list[int]:
    """Ids of a text's bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    order = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    shown = _byte_characters()
    data = text.encode() if isinstance(text, str) else text
    return [3 + order[shown[byte]] for byte in data]


def _byte_characters() -> dict[int, str]:
    # GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = chr(256 + n)
    return table


def save_byte_tokenizer(
    folder: Path, *, adds_bos: bool = True, bos: bool = True, chat: bool = True, config: dict[str, Any] | None = None
) -> Tokenizer:
    """Write a tokenizer whose tokens are single bytes; what it needs of a config.json is added if there is none."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    settings |= {"bos_token": "<s>"} if bos else {}
    settings |= {"chat_template": CHAT_TEMPLATE} if chat else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is not None or not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config or {}))
    return load_tokenizer(folder)


def save_tiny_with_tokenizer(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """A tiny model that has a tokenizer; returns the transformers model."""
    reference = save_tiny(folder, family, **{"vocab_size": VOCAB, **changes})
    save_byte_tokenizer(folder)
    return reference


class ScriptedDecoder:
    """A decoder whose next token is a function of the sequence so far: `say(tokens) -> token, or a row of logits`."""

    backend = "torch"
    fast_step = None
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, say: Callable[[list[int]], int | Tensor], *, positions: int = 256, vocab: int = VOCAB) -> None:
        attention = StandardAttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, rotary=None)
        self.spec = DecoderSpec(
            "scripted", vocab, 1, 1, positions, "rms", 1e-6, "silu", True, False, True, (attention,)
        )
        self.fed: list[int] = []  # tokens of each call
        self._say = say
        self._stories: list[list[int]] = []

    def make_cache(self, batch: int, capacity: int, quantizers: Any = None, dtype: Any = None) -> Cache:
        return Cache(self.spec, batch, capacity, dtype=self.dtype)

    def __call__(self, tokens: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        batch, new = tokens.shape
        counts = torch.full((batch,), new) if lengths is None else lengths
        ends = cache.host_lengths + counts
        cache.begin(new, ends)
        assert int(ends.max()) <= self.spec.max_position_embeddings
        places = cache.lengths[:, None] + torch.arange(new)
        values = tokens[..., None, None].float().expand(batch, new, 1, 2)
        cache.write(0, places, values, values)
        cache.advance(ends)
        self.fed.append(int(counts.sum()))
        history, _ = cache.read(0, cache.longest, self.dtype)
        names = torch.arange(batch * new, dtype=torch.float32).view(batch, new, 1) + len(self._stories)
        for row, start in enumerate((ends - counts).tolist()):
            self._stories += [history[row, : start + i + 1, 0, 0].long().tolist() for i in range(new)]
        return names  # a "hidden state" names the tokens up to it

    def logits(self, hidden: Tensor) -> Tensor:
        rows = []
        for name in hidden.flatten().tolist():
            said = self._say(self._stories[int(name)])
            if not isinstance(said, Tensor):
                row = torch.zeros(self.spec.vocab_size)
                row[said] = 10.0
                said = row
            rows.append(said)
        return torch.stack(rows)


def script(answer: Sequence[int], prompt: int) -> Callable[[list[int]], int]:
    """Says `answer` token by token after a prompt of `prompt` tokens, then its last token for ever."""
    return lambda tokens: answer[min(len(tokens) - prompt, len(answer) - 1)]


def save_tiny_deepseek(folder: Path, *, positions: int = 256) -> Any:
    """A tiny dense DeepSeek-V3 (latent 16, rotary key 4) with a tokenizer; returns the transformers model."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=2, n_routed_experts=1, max_position_embeddings=positions, initializer_range=0.4,
        bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model
