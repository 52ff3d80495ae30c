"""Weights of distances, against what autograd says of the scores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mla_cli.checkpoint.load import load_layer, open_model
from mla_cli.converters.distances import influence_by_distance, mean_turn
from mla_cli.model.decoder import begin_step
from mla_cli.model.rotary import inverse_frequencies, rotate
from mla_cli.model.spec import StandardAttentionSpec
from tests.tiny import save_tiny

TOKENS = 9


def moved_by_scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`[H, T, S]` squared change of a head's output for a change of one score, by autograd."""
    scores = (torch.einsum("thd,shd->hts", q, k) * scale).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e30)

    def heads(given: Tensor) -> Tensor:
        return given.softmax(dim=-1) @ v.transpose(0, 1)  # [H, T, d]

    moved = torch.autograd.functional.jacobian(heads, scores)  # [H, T, d, H, T, S]
    return moved.square().sum(dim=(2, 3, 4))


def test_a_distance_weighs_what_scores_there_do_to_the_output(tmp_path: Path) -> None:
    save_tiny(tmp_path, num_hidden_layers=1)
    model = open_model(str(tmp_path))
    spec = model.spec.attention[0]
    assert isinstance(spec, StandardAttentionSpec)
    assert spec.rotary is not None
    layer = load_layer(model, 0).self_attn
    x = torch.randn(2, TOKENS, model.spec.hidden_size, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([TOKENS, 6])
    valid = torch.arange(TOKENS) < lengths[:, None]
    step = begin_step(model.spec, valid.shape, x.device, lengths=lengths)
    record: dict[str, Tensor] = {}
    with torch.no_grad():
        layer(x, step, record)
        found = influence_by_distance(record, step, spec, valid)

        cos, sin = step.rotary(spec.rotary)
        per_group = spec.num_heads // spec.num_kv_heads
        q = rotate(record["q"], cos, sin, interleaved=False)
        k = rotate(record["k"], cos, sin, interleaved=False).repeat_interleave(per_group, dim=2)
        v = record["v"].repeat_interleave(per_group, dim=2)
    wanted = torch.zeros(spec.num_heads, TOKENS)
    for row in range(2):
        moved = moved_by_scores(q[row], k[row], v[row], spec.scale)
        for query in range(int(lengths[row])):
            for key in range(1, query + 1):  # not the first token
                wanted[:, query - key] += moved[:, query, key]
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-6)


def test_a_mean_turn_is_the_turn_where_all_weight_is_at_one_distance(tmp_path: Path) -> None:
    save_tiny(tmp_path, num_hidden_layers=1)
    spec = open_model(str(tmp_path)).spec.attention[0]
    assert isinstance(spec, StandardAttentionSpec)
    assert spec.rotary is not None
    weights = torch.zeros(2, TOKENS, dtype=torch.float64)
    weights[0, 5] = 3.0  # the second head looked at nothing
    turn = mean_turn(spec.rotary, weights)
    angle = -5 * inverse_frequencies(spec.rotary).double()
    torch.testing.assert_close(turn[0], torch.polar(torch.ones_like(angle), angle))
    torch.testing.assert_close(turn[1], torch.ones_like(turn[1]))
