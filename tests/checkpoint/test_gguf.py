"""GGUF files come back as the checkpoint they were made of; damaged and unknown ones are errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from mla_cli.checkpoint.gguf import is_complete, materialise_gguf
from mla_cli.checkpoint.gguf_file import read_gguf
from mla_cli.errors import InputError, MlaError, UnsupportedError
from tests.tiny import random_tokens, save_tiny

LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight", "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    *_, layer, rest = name.replace("transformer.h.", "model.layers.").split(".", 3)
    module, _, part = rest.rpartition(".")
    return f"blk.{layer}.{LLAMA_NAMES[module]}.{part}"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of q and k."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def add_bpe(writer: GGUFWriter, pre: str | None = "smollm", size: int = 64) -> None:
    tokens = ["<|end|>", "<|begin|>", "<|stop|>", "<tool>", *"thecaĠ0123", "th", "the", "Ġc"]
    kinds = [3, 3, 3, 4, *[1] * (len(tokens) - 4)]
    pads = [f"[PAD{i}]" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + pads)
    writer.add_token_types(kinds + [5] * len(pads))
    writer.add_token_merges(["t h", "th e", "Ġ c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def write_gguf(
    path: Path,
    model: Any,
    *,
    edit: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    keys: Mapping[str, Any] | None = None,
    add_tokenizer: Callable[[GGUFWriter], None] = add_bpe,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does; `kinds`: of tensors that `edit` made of raw blocks."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(head_dim(config))
        writer.add_key_length(head_dim(config))
        writer.add_value_length(head_dim(config))
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](f"{architecture}.{key}", value)
    add_tokenizer(writer)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj" in name:
            weight = permuted(weight, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            weight = permuted(weight, config.num_key_value_heads)
        if architecture == "gpt2" and ".c_" in name and weight.dim() == 2:
            weight = weight.T
        tensors[gguf_name(name)] = weight.float().contiguous().numpy()
    edit(tensors)
    for name, array in tensors.items():
        as_kind = kind if array.ndim == 2 else GGMLQuantizationType.F32
        raw = name in (kinds or {})
        as_kind = kinds[name] if kinds and raw else as_kind
        writer.add_tensor(name, array if raw else quantize(array, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def tiny(tmp_path: Path, family: str = "llama", **changes: Any) -> Any:
    return save_tiny(tmp_path / "source", family, dtype=torch.bfloat16, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "bias": 1.0, "rms_norm_eps": 1e-5}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"bias": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("gpt2", {"bias": 1.0}),
        ("gpt2", {"bias": 1.0, "tie_word_embeddings": False}),
    ],
)
def test_round_trip(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(tmp_path, family, **changes)
    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model))
    ours, source = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (folder, tmp_path / "source")
    )
    expected = source.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert ours.config.tie_word_embeddings == model.config.tie_word_embeddings
    tokens = random_tokens(2, 20)
    assert torch.equal(ours(tokens).logits, source(tokens).logits)  # and so are the settings


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], keys: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(tmp_path, rope_parameters={"rope_theta": 10000.0, **scaling})
    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model, keys=keys))
    tokens = random_tokens(1, 100)
    ours, source = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (folder, tmp_path / "source")
    )
    assert torch.equal(ours(tokens).logits, source(tokens).logits)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_from_its_table(tmp_path: Path, factor: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny(tmp_path, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    table = (plain / scaled).float().numpy()
    path = write_gguf(tmp_path / "model.gguf", model, edit=lambda tensors: tensors.update({"rope_freqs.weight": table}))
    config = json.loads((materialise_gguf(path) / "config.json").read_text(encoding="utf-8"))
    assert {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == parameters
    table[20] *= 1.01
    path = write_gguf(tmp_path / "other.gguf", model, edit=lambda tensors: tensors.update({"rope_freqs.weight": table}))
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        materialise_gguf(path)


def test_the_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny(tmp_path))
    oracle, ours = GGUFReader(path), read_gguf(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    for tensor in oracle.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(np.concatenate(list(ours.chunks(tensor.name))).ravel(), tensor.data.ravel())


def test_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from mla_cli.model.tokenizer import load_tokenizer

    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", tiny(tmp_path)))
    oracle, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = "the<|stop|> c<tool>  0123 the"
    assert ours.encode(text) == oracle(text)["input_ids"] == [15, 2, 16, 3, 9, 9, 10, 11, 12, 13, 9, 15]
    assert ours.decode(ours.encode(text)) == oracle.decode(ours.encode(text), skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {0, 2}, 17)  # without the padding
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from mla_cli.model.tokenizer import load_tokenizer

    def add(writer: GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁t", "he", "▁the", *"▁the", "<|im|>"]
        kinds = [2, 3, 3, *[6] * 256, *[1] * 7, 3]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types(kinds)

    model = tiny(tmp_path, vocab_size=272)
    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model, add_tokenizer=add))
    oracle, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = "the the<|im|>the é"
    ids = ours.encode(text)
    assert ids == oracle(text)["input_ids"] == [1, 261, 261, 266, 261, 262, 3 + 0xC3, 3 + 0xA9]
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "the the the é"
    assert (ours.bos_id, ours.eos_ids) == (1, {2})


def test_it_is_reused_and_repaired(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny(tmp_path))
    folder = materialise_gguf(path)
    assert folder.parent == cache / "gguf"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert materialise_gguf(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "model.safetensors").write_bytes(b"cut")
    assert not is_complete(folder)
    assert materialise_gguf(path) == folder
    assert is_complete(folder)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]  # nothing temporary is left


def test_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("mla_cli.checkpoint.gguf.SHARD_BYTES", 20_000)
    model = tiny(tmp_path)
    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in model.state_dict().items())


def test_an_output_equal_to_the_embedding_is_tied(tmp_path: Path) -> None:
    model = tiny(tmp_path, tie_word_embeddings=True)

    def double(tensors: dict[str, np.ndarray]) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"]

    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model, edit=double))
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"attention.sliding_window": 4096}, "sliding_window"),
        ({"expert_gating_func": 2}, "expert_gating_func"),
        ({"logit_scale": 2.0}, "logit_scale"),
    ],
)
def test_unknown_keys_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str, cache: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        materialise_gguf(write_gguf(tmp_path / "model.gguf", tiny(tmp_path), keys=keys))
    assert not list(cache.rglob("*.safetensors"))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"'mamba'.*llama, qwen2, .*gpt2"):
        materialise_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("pre", ["viking", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str | None, cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny(tmp_path), add_tokenizer=lambda writer: add_bpe(writer, pre))
    with pytest.raises(UnsupportedError, match=r"viking.*smollm" if pre else "does not name"):
        materialise_gguf(path)
    assert not list((cache / "gguf").iterdir())


def drop(tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.1.attn_q.weight"]


def extra(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q_norm.weight"] = np.ones(8, np.float32)


def wrong_shape(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-1]


def not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ffn_up.weight"][3, 4] = np.nan


@pytest.mark.parametrize(
    ("edit", "message"),
    [(drop, r"lacks the tensor blk\.1\.attn_q"), (extra, r"attn_q_norm\.weight would be unused"),
     (wrong_shape, r"blk\.1\.ffn_up\.weight has shape"), (not_finite, r"blk\.1\.ffn_up\.weight has values")],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        materialise_gguf(write_gguf(tmp_path / "model.gguf", tiny(tmp_path), edit=edit))


def test_too_many_tokens(tmp_path: Path) -> None:
    model = tiny(tmp_path, vocab_size=16)
    path = write_gguf(tmp_path / "model.gguf", model, add_tokenizer=lambda writer: add_bpe(writer, size=17))
    with pytest.raises(InputError, match="17 tokens but only 16"):
        materialise_gguf(path)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "model.gguf", tiny(tmp_path)).read_bytes()
    header = data.index(b"output_norm.weight")
    rng = np.random.default_rng(0)
    damaged = [b"", b"GGUF", b"nope" + data[4:], data[:-100], *(data[:n] for n in range(8, header, 397))]
    for _ in range(60):
        at = int(rng.integers(0, header))
        damaged.append(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    path = tmp_path / "damaged.gguf"
    for content in damaged:
        path.write_bytes(content)
        with contextlib.suppress(MlaError):  # or it is sound: a flipped byte can fall into a text
            materialise_gguf(path)
    for content in damaged[:4]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"damaged\.gguf"):
            materialise_gguf(path)
    with pytest.raises(InputError, match=r"missing\.gguf"):
        materialise_gguf(tmp_path / "missing.gguf")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MLA_CACHE", str(tmp_path / "file"))
    with pytest.raises(MlaError, match="MLA_CACHE"):
        materialise_gguf(write_gguf(tmp_path / "model.gguf", tiny(tmp_path)))
