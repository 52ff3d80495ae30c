"""What one client may ask for, and what the server holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cli.runtime.choices import DEFAULT_QUEUE, DEFAULT_REQUEST_SECONDS


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        queue: answers that may wait for a place in the batch; what is over it is refused (429).
        seconds: of one request, from its arrival to the end of its answer.
        answers: of one request: prompts times `n`.
        body: bytes of a request; header: bytes of its header.
        arrival_s: for a header, and for a body, to arrive. stall_s: for a client to read what was sent.
        pending: pieces that wait for a client; one that has more is not reading, and its request is cancelled.
        connections: at a time. drain_s: for answers to end in after the server was told to stop.
    """

    queue: int = DEFAULT_QUEUE
    seconds: float = DEFAULT_REQUEST_SECONDS
    answers: int = 128
    body: int = 1 << 20
    header: int = 32 << 10
    arrival_s: float = 30.0
    stall_s: float = 30.0
    pending: int = 1024
    connections: int = 2048
    drain_s: float = 4.0


def body_limit(context: int) -> int:
    """Bytes that a prompt of that many tokens fits in, however its characters are escaped."""
    return max(Limits.body, 32 * context)
