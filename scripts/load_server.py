"""Stream from a server of `mla generate --serve` with many clients at a time, and see that nothing is lost.

    python scripts/load_server.py CKPT --clients 200 --new-tokens 32

Starts the server, lets every client send its request at once with OpenAI's own client, and then asks for some of the answers
again, one at a time: each must be the same, token for token. Exit code 1 if an answer is missing, short or different.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

WORDS = "river stone winter engine letter garden market window silver mountain paper signal".split()


@dataclass(frozen=True)
class Heard:
    """One client's answer: text, tokens, chunks, seconds to the first and to the last of them."""

    text: str
    tokens: int
    chunks: int
    first_s: float
    whole_s: float


def asked(number: int, model: str, new_tokens: int) -> dict[str, Any]:
    """The request of a client: half of them greedy, half drawn by a seed of their own."""
    words = " ".join(WORDS[(number * k) % len(WORDS)] for k in range(1, 6 + number % 20))
    more = {"extra_body": {"ignore_eos": True}, "temperature": float(number % 2), "seed": number}
    return {"model": model, "prompt": f"{number}: {words}", "max_tokens": new_tokens, **more}


async def listen(client: Any, request: dict[str, Any]) -> Heard:
    """Send a request and hear its stream to the end."""
    began = time.perf_counter()
    text, tokens, chunks, first, ends = "", 0, 0, 0.0, 0
    async for chunk in await client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            first = first or time.perf_counter() - began
            text += choice.text
            chunks += 1
            ends += choice.finish_reason is not None
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    if ends != 1:
        raise ValueError(f"the stream has {ends} ends")
    return Heard(text, tokens, chunks, first, time.perf_counter() - began)


async def measure(url: str, model: str, clients: int, new_tokens: int, again: int) -> list[str]:
    """All at once, then some again; what is wrong."""
    import openai

    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600)
    requests = [asked(number, model, new_tokens) for number in range(clients)]
    await listen(client, requests[0])  # what is done once is done
    began = time.perf_counter()
    found = await asyncio.gather(*(listen(client, request) for request in requests), return_exceptions=True)
    seconds = time.perf_counter() - began
    whole = [answer for answer in found if isinstance(answer, Heard)]
    wrong = [f"client {i}: {answer!r}" for i, answer in enumerate(found) if not isinstance(answer, Heard)]
    wrong += [
        f"client {i}: {a.tokens} tokens" for i, a in enumerate(found) if isinstance(a, Heard) and a.tokens != new_tokens
    ]
    tokens = sum(answer.tokens for answer in whole)
    print(
        f"{len(whole)} of {clients} streams whole: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    )
    for title, times in (("first token", [a.first_s for a in whole]), ("whole answer", [a.whole_s for a in whole])):
        ordered = sorted(times)
        print(f"  {title}: median {ordered[len(ordered) // 2]:.2f} s, largest {ordered[-1]:.2f} s")
    for number in range(0, clients, max(1, clients // again)):
        alone, together = await listen(client, requests[number]), found[number]
        if isinstance(together, Heard) and (alone.text, alone.tokens) != (together.text, together.tokens):
            wrong.append(f"client {number}: another text among the others than alone")
    await client.close()
    print(f"  asked again alone: {len(range(0, clients, max(1, clients // again)))}")
    return wrong


def main() -> int:
    """Serve, measure, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--again", type=int, default=20, help="answers to ask for again")
    options, more = parser.parse_known_args()  # the rest is for `mla generate`
    command = [sys.executable, "-m", "mla_cli", "generate", options.checkpoint, "--serve", ":0", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(line, end="")
            if line.startswith("serving "):
                break
        else:
            return 1
        model, url = line.split()[1], line.split()[3].rstrip(";")
        wrong = asyncio.run(measure(url, model, options.clients, options.new_tokens, options.again))
    finally:
        process.terminate()
        said = process.communicate(timeout=30)[1]
    faults = [line for line in said.splitlines() if line != "mla: interrupted"]
    print(*wrong[:20], *faults[:20], f"{len(wrong)} wrong, {len(faults)} faults", sep="\n")
    return 1 if wrong or faults else 0


if __name__ == "__main__":
    sys.exit(main())
