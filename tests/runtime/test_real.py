"""The generator on the real model, beside transformers."""

from __future__ import annotations

import pytest
import torch

from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Q: What is 12 + 30?\nA:",
    "The three most important inventions of the nineteenth century are",
    "Photosynthesis is the process by which",
    "To be, or not to be",
]


def test_greedy_text_equals_transformers_alone_and_batched() -> None:
    import transformers

    engine = open_engine("smollm2-135m")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        engine.model.source.folder, dtype=torch.float32, attn_implementation="eager"
    )
    requests = [Request(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in PROMPTS]
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)  # fmt: skip
        expected.append(engine.tokenizer.decode(out[0, ids.shape[1] :].tolist()))
    alone = [engine.generator.complete(request).text for request in requests]
    assert alone == expected
    batched = Generator(engine.generator.decoder, engine.tokenizer, max_batch=8).generate(requests)
    assert [answer.text for answer in batched if isinstance(answer, Completion)] == expected
