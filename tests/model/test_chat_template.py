"""Chat templates render as in transformers, and cannot do anything else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mla_cli.errors import InputError
from mla_cli.model.chat_template import find_template, render
from mla_cli.model.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>你好 😀</b>\n"},
    {"role": "assistant", "content": "Hi.", "tool_calls": None},
    {"role": "user", "content": "Bye"},
]
CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{{ m | tojson }}{{ loop.index }}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ strftime_now('%Y') }}{{ '%s-%d' | format('a', 3) }}{{ 'x' | center(9) }}{{ '{:>4}'.format(1) }}",
    "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ missing }}{{ messages[2].tool_calls is defined }}",
]
HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{{ ((10**60)**60)**60 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a\nb' | indent(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w='9999999999') }}",
    "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 100000 %}{{ x.join([x] * 100000) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('a') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ lipsum(n=10**7) }}",
    "{% include 'x' %}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[0].content.nothing.more }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "(" * 5 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]


def tiny(folder: Path, *, adds_bos: bool = False, **settings: Any) -> Path:
    words = {word: i for i, word in enumerate(["<s>", "</s>", "hi", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers(tmp_path: Path, template: str, prompt: bool) -> None:
    from transformers import AutoTokenizer

    folder = tiny(tmp_path, chat_template=template)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, add_generation_prompt=prompt, tokenize=False
    )
    assert load_tokenizer(folder).render_chat(CHAT, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_templates_are_errors(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr("mla_cli.model.chat_template.SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(InputError, match="chat template") as caught:
        render(template, CHAT, add_generation_prompt=True, special_tokens={}, where="here")
    assert time.monotonic() - start < 5
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos(tmp_path: Path, adds_bos: bool) -> None:
    chat = [{"role": "user", "content": "hi"}]
    template = "{{ bos_token }} {{ messages[0].content }}"
    with_bos = load_tokenizer(tiny(tmp_path / "a", adds_bos=adds_bos, chat_template=template))
    assert with_bos.encode_chat(chat) == [0, 2]
    without = load_tokenizer(tiny(tmp_path / "b", adds_bos=adds_bos, chat_template="{{ messages[0].content }}"))
    assert without.encode_chat(chat) == ([0, 2] if adds_bos else [2])


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    assert find_template(tmp_path, {"chat_template": named[:1]}) == "T"
    assert find_template(tmp_path, {}) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}', encoding="utf-8")
    assert find_template(tmp_path, {}) == "J"
    assert find_template(tmp_path, {"chat_template": "C"}) == "C"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert find_template(tmp_path, {"chat_template": "C"}) == "F"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        find_template(tmp_path, {})


def test_no_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template.*plain prompt"):
        load_tokenizer(tiny(tmp_path)).render_chat(CHAT)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}], [{"role": 1, "content": "hi"}],
                                      [{"role": "user", "content": object()}]])  # fmt: skip
def test_malformed_messages_are_errors(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(InputError, match=r"message|conversation"):
        load_tokenizer(tiny(tmp_path, chat_template=CHATML)).render_chat(messages)
