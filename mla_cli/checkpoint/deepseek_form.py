"""The stock form: a converted layer as tensors of an unmodified `deepseek_v3` model, which transformers and vLLM run.

DeepSeek puts an RMSNorm on the latent; a converted model has none. Constant channels neutralise it exactly: with the bias
`B_j = s_j 2^k` on `m` channels whose weight rows are zero, and `sum s_j^2 = r`, the mean square of the latent is `4^k` up to
`|c|^2 / r`, far below the last bit, so the norm divides by `2^k`, and a norm weight of `2^k` undoes that.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_cli.errors import UsageError
from mla_cli.model.attention import LatentAttention
from mla_cli.model.families.base import Config
from mla_cli.model.latent_weights import LatentWeights, bias_or_zeros
from mla_cli.model.rotary import inverse_frequencies
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec

LOG2_SCALE = 16  # k: large enough that |c|^2 vanishes beside r * 4^k in float32, small enough for every exponent range


def why_not_stock(spec: DecoderSpec) -> str | None:
    """What in a standard decoder the stock form cannot say; None if it can say all."""
    if spec.learned_positions:
        return "learned positions"
    unusual = spec.unusual()
    if unusual is not None:
        return unusual
    if spec.norm != "rms":
        return f"{spec.norm} norm"
    if not spec.gated_mlp or spec.mlp_bias:
        return "an MLP with biases" if spec.mlp_bias else "an MLP without a gate"
    shapes = {(a.num_heads, a.scale, a.rotary) for a in spec.attention}
    if len(shapes) > 1:
        return "layers of different shapes"
    for attention in spec.attention:
        if attention.rotary is None:
            return "layers without rotary embedding"
        if attention.window is not None and attention.window < spec.max_position_embeddings:
            return f"a sliding window of {attention.window} tokens"
        if attention.softcap is not None:
            return "soft-capped attention scores"
    return None


@functools.cache
def constant_channels(rank: int) -> tuple[int, ...]:
    """The fewest whole numbers whose squares sum to `rank` (at most four: Lagrange), largest first."""
    for count in (1, 2, 3, 4):
        found = _squares(rank, count)
        if found is not None:
            return found
    raise AssertionError("every whole number is a sum of four squares")


def _squares(rest: int, count: int) -> tuple[int, ...] | None:
    top = int(rest**0.5)
    while top * top > rest:
        top -= 1
    if count == 1:
        return (top,) if top * top == rest and top else None
    for largest in range(top, 0, -1):
        others = _squares(rest - largest * largest, count - 1)
        if others is not None and others[0] <= largest:
            return (largest, *others)
    return None


def query_rank(hidden: int) -> int:
    """`q_lora_rank` that carries a query bias: the hidden size and the fewest constant channels that neutralise the norm."""
    for extra in range(1, 5):
        if len(constant_channels(hidden + extra)) <= extra:
            return hidden + extra
    return hidden + 4


def free_rank(kv_lora_rank: int) -> int:
    """Latent channels that remain for the model beside the constant ones."""
    return kv_lora_rank - len(constant_channels(kv_lora_rank))


def stock_tensors(weights: LatentWeights, kv_lora_rank: int, *, query_bias: bool) -> dict[str, Tensor]:
    """A layer's tensors below `self_attn.`, float64.

    Args:
        weights: a layer with `free_rank(kv_lora_rank)` latent channels, whose rotary slots `stock_config` was given.
        kv_lora_rank: width of the latent with constant channels.
        query_bias: whether queries go through `q_a` and `q_b`, which is how a bias is carried.
    """
    s, hidden = weights.spec, weights.q.shape[-1]
    if s.gate_chunk is not None:
        raise UsageError("the stock DeepSeek form cannot express a gate on the latent", fix="use --format native")
    if s.norm_eps is not None:
        raise UsageError("the stock DeepSeek form has no room for a norm on the latent", fix="use --format native")
    if s.kv_lora_rank != free_rank(kv_lora_rank):
        raise UsageError(
            f"{s.kv_lora_rank} latent channels do not fit a latent of {kv_lora_rank} with constant channels",
            fix="use --format native",
        )
    stock_scale = s.qk_head_dim**-0.5
    fold = s.scale / stock_scale  # stock attention fixes its own softmax scale
    bias, norm = _neutral_latent(kv_lora_rank)
    r, m = s.kv_lora_rank, len(bias)
    zeros = weights.down.new_zeros
    up = torch.cat((weights.up_k, weights.up_v), dim=1).flatten(0, 1)  # [H*(nope+v), r]
    named = {
        "kv_a_proj_with_mqa.weight": torch.cat((weights.down[:r], zeros(m, hidden), weights.down[r:])),
        "kv_a_proj_with_mqa.bias": torch.cat((weights.down_bias[:r], bias, weights.down_bias[r:])),
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": torch.cat((up, zeros(up.shape[0], m)), dim=1),
        "o_proj.weight": weights.out,
        "o_proj.bias": weights.out_bias,
    }
    q = weights.q.flatten(0, 1) * fold  # [H*(nope+rope), D]
    if not query_bias:
        named["q_proj.weight"] = q
        return named
    width = query_rank(hidden)
    carried = zeros(q.shape[0], width - hidden)
    # After the norm that channel holds its s_j.
    carried[:, 0] = weights.q_bias.flatten() * fold / constant_channels(width)[0]
    return named | _neutral_query(hidden) | {"q_b_proj.weight": torch.cat((q, carried), dim=1)}


def _neutral_latent(kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Biases of the constant channels `[m]`, and the weight of the norm that they neutralise `[r + m]`."""
    scale, constants = 2.0**LOG2_SCALE, constant_channels(kv_lora_rank)
    norm = torch.full((kv_lora_rank,), scale, dtype=torch.float64)
    norm[kv_lora_rank - len(constants) :] = 0.0
    return torch.tensor(constants, dtype=torch.float64) * scale, norm


def _neutral_query(hidden: int) -> dict[str, Tensor]:
    """What stands before `q_b`, and hands it the hidden state and a constant: no more than a detour for a bias."""
    scale, width = 2.0**LOG2_SCALE, query_rank(hidden)
    constants = torch.tensor(constant_channels(width), dtype=torch.float64)
    weight = torch.eye(width, hidden, dtype=torch.float64)
    bias, norm = torch.zeros(2, width, dtype=torch.float64)
    bias[hidden : hidden + len(constants)] = constants * scale
    norm[:hidden] = scale
    norm[hidden] = 1.0
    return {"q_a_proj.weight": weight, "q_a_proj.bias": bias, "q_a_layernorm.weight": norm}


def weights_of_stock(attention: LatentAttention) -> LatentWeights | None:
    """A stock layer without its detours: no norm, no constant channels. None for a layer that `stock_tensors` did not make.

    The softmax scale stays the stock one.
    """
    s, hidden = attention.spec, attention.o_proj.out_features
    down, up = _plain(attention.kv_a_proj_with_mqa.weight), _plain(attention.kv_b_proj.weight)
    down_bias = bias_or_zeros(attention.kv_a_proj_with_mqa)
    bias, norm = _neutral_latent(s.kv_lora_rank)
    r = free_rank(s.kv_lora_rank)
    constant = slice(r, s.kv_lora_rank)
    if (
        s.norm_eps is None
        or r < 1
        or not torch.equal(_plain(attention.kv_a_layernorm.weight), norm)
        or not torch.equal(down_bias[constant], bias)
        or bool(down[constant].any())
    ):
        return None
    if s.q_lora_rank is None:
        q, q_bias = _plain(attention.q_proj.weight), bias_or_zeros(attention.q_proj)
    elif has_query_detour(attention):
        q = _plain(attention.q_b_proj.weight)
        q, q_bias = q[:, :hidden], q[:, hidden] * constant_channels(s.q_lora_rank)[0]
    else:
        return None
    up = up[:, :r].reshape(s.num_heads, -1, r)  # [H, nope+v, r]
    return LatentWeights(
        replace(s, kv_lora_rank=r, q_lora_rank=None, norm_eps=None),
        q.reshape(s.num_heads, s.qk_head_dim, hidden),
        q_bias.reshape(s.num_heads, s.qk_head_dim),
        torch.cat((down[:r], down[s.kv_lora_rank :])),
        torch.cat((down_bias[:r], down_bias[s.kv_lora_rank :])),
        up[:, : s.qk_nope_head_dim],
        up[:, s.qk_nope_head_dim :],
        _plain(attention.o_proj.weight),
        bias_or_zeros(attention.o_proj),
    ).with_needed_biases()


def has_query_detour(attention: LatentAttention) -> bool:
    """Whether a layer's queries go through `q_a` and `q_b` for their bias alone."""
    s, hidden = attention.spec, attention.o_proj.out_features
    if s.q_lora_rank is None or s.q_lora_rank != query_rank(hidden):
        return False
    detour = attention.state_dict()
    made = _neutral_query(hidden)
    return all(name in detour and torch.equal(_plain(detour[name]), tensor) for name, tensor in made.items())


def without_query_detour(attention: LatentAttention) -> LatentAttention:
    """The layer with its query bias as a bias, sharing all else; the layer itself where there is no detour for one."""
    if not has_query_detour(attention):
        return attention
    s, hidden = attention.spec, attention.o_proj.out_features
    assert s.q_lora_rank is not None
    with torch.device("meta"):
        plain = LatentAttention(replace(s, q_lora_rank=None, q_bias=True), hidden, attention.layer)
    state = {name: tensor for name, tensor in attention.state_dict().items() if not name.startswith("q_")}
    q = attention.q_b_proj.weight.detach()  # [H*(nope+rope), D+m]
    state["q_proj.weight"] = q[:, :hidden].contiguous()
    state["q_proj.bias"] = q[:, hidden] * constant_channels(s.q_lora_rank)[0]
    plain.load_state_dict(state, strict=True, assign=True)
    return plain.requires_grad_(False).eval()  # type: ignore[return-value]


def _plain(weight: Tensor) -> Tensor:
    return weight.detach().cpu().double()


def stock_config(
    source_config: Config, spec: DecoderSpec, attention: LatentAttentionSpec, kv_lora_rank: int, *, query_bias: bool
) -> Config:
    """The `config.json` of a stock checkpoint. `attention` is any of its layers (all are alike)."""
    kept = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")
    layers, heads = spec.num_layers, attention.num_heads
    return {
        # vLLM goes by this and takes its Transformers backend, which honours the biases; transformers goes by model_type.
        "architectures": ["TransformersForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: source_config[key] for key in kept if key in source_config},
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": spec.activation,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "q_lora_rank": query_rank(spec.hidden_size) if query_bias else None,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_interleave": True,
        **_rope_config(attention),
        "first_k_dense_replace": layers,
        "n_routed_experts": 1,  # null is refused by transformers; no layer uses it
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def _rope_config(attention: LatentAttentionSpec) -> dict[str, Any]:
    rotary = attention.rotary
    assert rotary is not None  # why_not_stock has refused it
    scaling = _source_scaling(rotary) if _is_plain(attention) else _table_scaling(attention, rotary)
    config: dict[str, Any] = {
        "rope_theta": rotary.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rotary.theta, **scaling},
    }
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _is_plain(attention: LatentAttentionSpec) -> bool:
    """Whether the slots are the source's frequencies, all of them in order."""
    assert attention.rotary is not None
    return attention.frequencies is None or attention.frequencies == tuple(range(attention.rotary.dim // 2))


def _table_scaling(attention: LatentAttentionSpec, rotary: RotarySpec) -> dict[str, Any]:
    """Any table of frequencies, as LongRoPE: each slot's plain frequency over the one it is to turn at."""
    assert attention.frequencies is not None
    pairs = len(attention.frequencies)
    plain = rotary.theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    wanted = inverse_frequencies(rotary).double()[list(attention.frequencies)]
    factors = (plain / wanted).tolist()
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": rotary.attention_factor,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": max(1, rotary.original_max_position_embeddings),
    }


def _source_scaling(rotary: RotarySpec) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    if rotary.kind != "default":
        scaling = {"rope_type": rotary.kind, "factor": rotary.factor}
    if rotary.kind == "llama3":
        scaling |= {
            "low_freq_factor": rotary.low_freq_factor,
            "high_freq_factor": rotary.high_freq_factor,
            "original_max_position_embeddings": rotary.original_max_position_embeddings,
        }
    if rotary.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rotary.original_max_position_embeddings,
            # Said outright, so that no engine derives it from mscale keys and rescales the softmax as well.
            "attention_factor": rotary.attention_factor,
            "beta_fast": rotary.beta_fast,
            "beta_slow": rotary.beta_slow,
            "truncate": rotary.truncate,
        }
    if rotary.kind == "longrope":
        scaling |= {
            "original_max_position_embeddings": rotary.original_max_position_embeddings,
            "attention_factor": rotary.attention_factor,
            "short_factor": list(rotary.short_factor),
            "long_factor": list(rotary.long_factor),
        }
    return scaling
