"""Malformed and hostile requests, some hundreds of those that `scripts/fuzz_server.py` sends by ten thousands."""

from __future__ import annotations

from scripts.fuzz_server import fuzz
from tests.server.support import MODEL, Running


def test_every_request_is_answered_or_refused_with_a_reason(server: Running) -> None:
    before = server.complete("hello", max_tokens=8)["choices"]
    outcome = fuzz("127.0.0.1", server.port, MODEL, 800, seed=3, threads=4)
    assert outcome.failures == []
    assert outcome.statuses[200] > 30
    assert outcome.statuses[400] > 200
    assert sum(outcome.statuses.values()) == 800
    assert server.complete("hello", max_tokens=8)["choices"] == before
    server.wait_idle()
    assert server.faults == []
