"""The decoder's own tensors with their shapes, and rules that find them under a family's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mla_cli.errors import InputError
from mla_cli.model.families.base import RESTORE, TensorRule
from mla_cli.model.latent_gate import gate_shapes
from mla_cli.model.norms import norm_parts
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, StandardAttentionSpec

MOST_FUSED_ROWS = 1 << 20  # a damaged number would exhaust memory before a shape is compared
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """Where one of the decoder's modules is: rows of a module of the file that has `total` of them."""

    source: str
    rows: range | tuple[int, ...]
    total: int


# Of a decoder's layer: its modules that are rows of others.
Fused = Callable[[DecoderSpec, int], Mapping[str, Part]]


@dataclass(frozen=True)
class Names:
    """A family's names, where they differ from Llama's.

    Attributes:
        top: modules outside layers, e.g. `model.norm`.
        layer: prefix of layer `{}`.
        parts: modules of a layer, below its prefix; the longest beginning of a module's name that stands here counts.
        fused: modules of a layer that are rows of others.
        transposed: modules of the file that are stored as `[in, out]`.
    """

    top: Mapping[str, str] = field(default_factory=dict)
    layer: str = "model.layers.{}"
    parts: Mapping[str, str] = field(default_factory=dict)
    fused: Fused = lambda spec, layer: {}
    transposed: frozenset[str] = frozenset()


def tensor_rules(spec: DecoderSpec, names: Names) -> dict[str, TensorRule]:
    """A rule for every tensor of the decoder."""
    rules = {}
    for name, shape in _top_shapes(spec).items():
        module, _, part = name.rpartition(".")
        rules[name] = TensorRule(f"{names.top.get(module, module)}.{part}", shape)
    for index in range(spec.num_layers):
        prefix, fused = names.layer.format(index), names.fused(spec, index)
        for name, shape in _layer_shapes(spec, index).items():
            module, _, part = name.rpartition(".")
            found = fused.get(module)
            theirs = found.source if found is not None else _renamed(module, names.parts)
            whole = shape if found is None else (found.total, *shape[1:])
            transpose = theirs in names.transposed and len(whole) == 2
            rules[f"model.layers.{index}.{name}"] = TensorRule(
                f"{prefix}.{theirs}.{part}", whole[::-1] if transpose else whole, transpose,
                None if found is None else found.rows,
            )  # fmt: skip
    return rules


def _renamed(module: str, parts: Mapping[str, str]) -> str:
    begin = module
    while begin:
        if begin in parts:
            return parts[begin] + module[len(begin) :]
        begin = begin.rpartition(".")[0]
    return module


def llama_names(spec: DecoderSpec, names: frozenset[str] = frozenset()) -> dict[str, TensorRule]:
    """Every tensor under the decoder's own name, which is Llama's where Llama has it."""
    return tensor_rules(spec, Names())


def _top_shapes(spec: DecoderSpec) -> Shapes:
    hidden = spec.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    if spec.learned_positions:
        shapes["model.embed_positions.weight"] = (spec.max_position_embeddings, hidden)
    for norm in ("model.norm", *(["model.embed_norm"] if spec.embedding_norm else [])):
        shapes |= {f"{norm}.{part}": (hidden,) for part in norm_parts(spec.norm)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
        if spec.head_bias:
            shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def _layer_shapes(spec: DecoderSpec, index: int) -> Shapes:
    attention, hidden = spec.attention[index], spec.hidden_size
    if isinstance(attention, LatentAttentionSpec):
        own = latent_shapes(attention, hidden)
    else:
        own = _standard_shapes(attention, hidden)
    shapes = {f"self_attn.{name}": shape for name, shape in own.items()}
    for norm in _branch_norms(spec):
        shapes |= {f"{norm}.{part}": (hidden,) for part in norm_parts(spec.norm)}
    experts = spec.experts[index] if spec.experts else None
    if experts is None:
        return shapes | _mlp_shapes(spec, "mlp", spec.intermediate_size)
    shapes["mlp.router.weight"] = (experts.count, hidden)
    for expert in range(experts.count):
        shapes |= _mlp_shapes(spec, f"mlp.experts.{expert}", experts.intermediate_size)
    if experts.shared_size:
        shapes["mlp.shared_gate.weight"] = (1, hidden)
        shapes |= _mlp_shapes(spec, "mlp.shared", experts.shared_size)
    return shapes


def _branch_norms(spec: DecoderSpec) -> Iterator[str]:
    if spec.branch_norm != "after":
        yield "input_layernorm"
        if spec.parallel != "one_norm":
            yield "post_attention_layernorm"
    if spec.branch_norm != "before":
        yield from ("attention_output_norm", "mlp_output_norm")


def _mlp_shapes(spec: DecoderSpec, name: str, inner: int) -> Shapes:
    hidden = spec.hidden_size
    matrices = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if spec.gated_mlp:
        matrices["gate_proj"] = (inner, hidden)
    return _linear_shapes({f"{name}.{matrix}": (shape, spec.mlp_bias) for matrix, shape in matrices.items()})


def _linear_shapes(matrices: Mapping[str, tuple[tuple[int, ...], bool]]) -> Shapes:
    shapes: Shapes = {}
    for name, (shape, bias) in matrices.items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _standard_shapes(a: StandardAttentionSpec, hidden: int) -> Shapes:
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes = _linear_shapes(
        {
            "q_proj": ((q, hidden), a.q_bias), "k_proj": ((kv, hidden), a.kv_bias), "v_proj": ((kv, hidden), a.kv_bias),
            "o_proj": ((hidden, q), a.o_bias),
        }
    )  # fmt: skip
    if a.qk_norm is not None:
        shapes["q_norm.weight"] = (q if a.qk_norm.whole else a.head_dim,)
        shapes["k_norm.weight"] = (kv if a.qk_norm.whole else a.head_dim,)
    return shapes


def latent_shapes(a: LatentAttentionSpec, hidden: int) -> Shapes:
    """Tensor names of a latent layer below `self_attn.` and their shapes."""
    query = a.num_heads * a.qk_head_dim
    if a.qk_norm is not None:
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes = _linear_shapes(
            {
                "q_norm_proj": ((q, hidden), a.qk_norm.bias), "k_norm_proj": ((k, hidden), a.qk_norm.bias),
                "q_map": ((query, a.head_dim), False),
            }
        )  # fmt: skip
    elif a.q_lora_rank is None:
        shapes = _linear_shapes({"q_proj": ((query, hidden), a.q_bias)})
    else:
        shapes = _linear_shapes(
            {"q_a_proj": ((a.q_lora_rank, hidden), a.kv_a_bias), "q_b_proj": ((query, a.q_lora_rank), False)}
        )
        shapes["q_a_layernorm.weight"] = (a.q_lora_rank,)
    up = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    shapes |= _linear_shapes(
        {
            "kv_a_proj_with_mqa": ((a.down_width, hidden), a.kv_a_bias), "kv_b_proj": ((up, a.kv_lora_rank), False),
            "o_proj": ((hidden, a.num_heads * a.v_head_dim), a.o_bias),
        }
    )  # fmt: skip
    if a.norm_eps is not None:
        shapes["kv_a_layernorm.weight"] = (a.kv_lora_rank,)
    if a.gate_chunk is not None:
        shapes |= {f"latent_gate.{name}": shape for name, shape in gate_shapes(a.kv_lora_rank).items()}
    return shapes


def stacked(source: str, **widths: int) -> dict[str, Part]:
    """Modules that lie one below the other in `source`; `widths` are their names, `__` for a dot, and rows."""
    total, parts, start = sum(widths.values()), {}, 0
    for name, width in widths.items():
        parts[name.replace("__", ".")] = Part(source, range(start, start + width), total)
        start += width
    return parts


def stacked_qkv(source: str) -> Fused:
    """Queries, keys and values that lie one below the other."""

    def parts(spec: DecoderSpec, layer: int) -> dict[str, Part]:
        a = _standard(spec, layer)
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        return stacked(source, self_attn__q_proj=q, self_attn__k_proj=kv, self_attn__v_proj=kv)

    return parts


@lru_cache(maxsize=64)  # the layers of a model share them
def _rows_of_groups(groups: int, width: int, begin: int, end: int) -> tuple[int, ...]:
    """Rows `begin` to `end` of every group of `width` rows."""
    if groups * width > MOST_FUSED_ROWS:
        raise InputError(f"config.json: no model has {groups * width:,} rows of queries, keys and values", fix=RESTORE)
    return tuple(group * width + row for group in range(groups) for row in range(begin, end))


def grouped_qkv(source: str) -> Fused:
    """Group by group its queries, its key and its value: `[G, H/G + 2, d]`. With as many groups as heads: head by head."""

    def parts(spec: DecoderSpec, layer: int) -> dict[str, Part]:
        a = _standard(spec, layer)
        each, d = a.num_heads // a.num_kv_heads, a.head_dim
        width = (each + 2) * d
        spans = {"q": (0, each * d), "k": (each * d, (each + 1) * d), "v": ((each + 1) * d, width)}
        return {
            f"self_attn.{name}_proj": Part(
                source,
                _rows_of_groups(a.num_kv_heads, width, *span),
                a.num_kv_heads * width,
            )
            for name, span in spans.items()
        }

    return parts


def _standard(spec: DecoderSpec, layer: int) -> StandardAttentionSpec:
    attention = spec.attention[layer]
    assert isinstance(attention, StandardAttentionSpec)
    return attention
