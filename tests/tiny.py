"""Tiny random models of every family, with logits that are not flat, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mla_cli.app import main
from mla_cli.checkpoint.latent_strength import narrowed_layer
from mla_cli.model.decoder import Decoder, DecoderLayer

SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2_SHAPE = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
MHA = {"num_attention_heads": 4, "num_key_value_heads": None, "head_dim": None, "hidden_size": 32}
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 8}
BY_N = dict.fromkeys(  # names of their own
    ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings")
)
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Family -> its classes in transformers, and what differs from SHAPE (None: the key is left out).
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": None}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"head_dim": None, "pad_token_id": 0}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {
        **HEADS, "head_dim": None, "no_rope_layer_interval": 2, "pad_token_id": 0,
    }),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {"head_dim": None}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"head_dim": None}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {
        "head_dim": None, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    }),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"head_dim": None, "sliding_window": None}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"head_dim": None, **HEADS}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**MHA}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT2_SHAPE, "rotary_dim": 4, **BY_N}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**HEADS, "head_dim": None}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.5}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**MHA}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **BY_N}),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, **BY_N}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {
        **EXPERTS, "head_dim": None, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
    }),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
}  # fmt: skip


def save_tiny(folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0,
              max_shard_size: str = "50GB", **changes: Any) -> Any:  # fmt: skip
    """Save a tiny model to `folder` and return it (transformers, eval mode).

    `bias=value` fills every bias with values around that number: random initialisation leaves them at zero.
    """
    import transformers

    bias = changes.pop("bias", None)
    config_class, model_class, differs = TINY[family]
    shape = {**(GPT2_SHAPE if family == "gpt2" else SHAPE), **differs}
    given = {key: value for key, value in shape.items() if value is not None or key == "sliding_window"}
    config = getattr(transformers, config_class)(**{**given, **changes})
    if family != "falcon":  # (its eager attention adds ALiBi twice)
        config._attn_implementation = "eager"  # the only one that knows every structure
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if bias is not None and name.endswith("bias"):
                parameter.normal_(bias, 1.0)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)  # norms: ones would hide a dropped one
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def random_tokens(batch: int, length: int, *, vocab: int = 64, seed: int = 1) -> torch.Tensor:
    """`[B, T]` random token ids."""
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of 64 single characters beside a tiny model, readable by ours and by transformers."""
    import json
    import string

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = [*string.ascii_lowercase, *string.ascii_uppercase[:20], *" .,!?'\n0123456789"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters][:64])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".|\\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_text(path: Path, characters: int = 4000, seed: int = 0) -> Path:
    """Text of the tiny tokenizer's letters, to calibrate on."""
    import random

    rng = random.Random(seed)
    path.write_text("".join(rng.choice("abcdefghijklmnopqrstuvwxyz .,\n") for _ in range(characters)))
    return path


def run_convert(source: Path, *more: object) -> int:
    """Run `mla convert` on `source` into the folder `out` beside it, on 12 sequences of the `text.txt` there."""
    words = [source, source.parent / "out", "--calib", source.parent / "text.txt", "--samples", 12, "--seq-len", 32]
    return main(["convert", *map(str, [*words, *more])])


def with_latent_strength(decoder: Decoder, strength: float) -> Decoder:
    """A decoder with the first share of each latent's channels, as it is made where models are loaded to run."""
    layers: list[DecoderLayer] = list(decoder.layers)  # type: ignore[arg-type]
    return decoder.with_layers([narrowed_layer(layer, strength) for layer in layers])
