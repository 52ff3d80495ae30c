"""Write a Llama checkpoint of real shapes and random weights, tensor by tensor, with a tokenizer and a text to calibrate on.

    python scripts/make_shaped_checkpoint.py /tmp/shaped                 # Llama-3-8B: 16 GB in bfloat16
    python scripts/make_shaped_checkpoint.py /tmp/shaped --layers 4      # the same widths, fewer layers

It takes the memory of one tensor. What it makes has nothing to say: it is there to see what a size costs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from mla_cli.checkpoint.writer import MAX_SHARD_BYTES, CheckpointWriter

SHAPES = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-3-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
}  # fmt: skip
TEXT = "text.txt"
POOL = 1 << 22


def write_checkpoint(
    folder: Path, config: dict[str, int], *, max_shard_bytes: int = MAX_SHARD_BYTES, seed: int = 0
) -> None:
    """A Llama of these shapes in bfloat16, its matrices random with outputs about as large as their inputs.

    Numbers are drawn once, and each row of a matrix takes some of them from a place of its own: eight thousand million draws
    would take longer than a conversion.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, generator=generator)
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:

        def add(name: str, *shape: int) -> None:
            scaled = (pool * shape[-1] ** -0.5).bfloat16()
            places = torch.randint(POOL - shape[-1], shape[:1], generator=generator).tolist()
            writer.add(name, torch.stack([scaled[place : place + shape[-1]] for place in places]))

        add("model.embed_tokens.weight", config["vocab_size"], width)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            for name, rows in (("q", width), ("k", kv), ("v", kv), ("o", width)):
                add(f"{prefix}.self_attn.{name}_proj.weight", rows, width)
            add(f"{prefix}.mlp.gate_proj.weight", inner, width)
            add(f"{prefix}.mlp.up_proj.weight", inner, width)
            add(f"{prefix}.mlp.down_proj.weight", width, inner)
            for name in ("input_layernorm", "post_attention_layernorm"):
                writer.add(f"{prefix}.{name}.weight", torch.ones(width, dtype=torch.bfloat16))
        writer.add("model.norm.weight", torch.ones(width, dtype=torch.bfloat16))
        add("lm_head.weight", config["vocab_size"], width)
        writer.write_json(
            "config.json",
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
                "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16", **config,
            },
        )  # fmt: skip
        _write_tokenizer(writer)
    text = random.Random(seed)
    (folder / TEXT).write_text("".join(text.choice("abcdefghijklmnopqrstuvwxyz .,\n") for _ in range(20_000)))


def _write_tokenizer(writer: CheckpointWriter) -> None:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    writer.write_text("tokenizer.json", tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    writer.write_text("tokenizer_config.json", json.dumps(settings))


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="so many layers instead of the shape's")
    parser.add_argument("--vocab", type=int, help="so many tokens instead of the shape's")
    options = parser.parse_args()
    config = dict(SHAPES[options.shape])
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    config["vocab_size"] = options.vocab or config["vocab_size"]
    write_checkpoint(options.folder, config)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(f"{options.folder}: {size / 1e9:.2f} GB; calibrate on {options.folder / TEXT}")


if __name__ == "__main__":
    main()
