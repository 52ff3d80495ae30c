"""Tiny models with a tokenizer that merges across words and letters, and data in the formats of the built-in tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny

WORDS = (
    "the a man woman child dog river house runs walks sings takes gives opens closes red small large old and then with "
    "under over into piano coffee naïveté answer question door window stone water quickly slowly again never"
).split()
VOCAB = 420
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sentence(rng: random.Random, words: int) -> str:
    """Random words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def save_bpe(folder: Path, *, adds_bos: bool = True, bos: bool = True) -> None:
    """A byte-level BPE tokenizer, readable by ours and by transformers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    rng = random.Random(0)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in ("<pad>", BOS, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [sentence(rng, 20) + "\nQuestion: 12 Answer: 345 #### 6" for _ in range(60)]
    backend.train_from_iterator(texts, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": "<pad>"}
    settings |= {"bos_token": BOS} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))


def save_model(folder: Path, family: str = "llama", *, adds_bos: bool = True, bos: bool = True, **changes: Any) -> Any:
    """A tiny model with that tokenizer; returns the transformers model."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    model = save_tiny(folder, family, vocab_size=VOCAB, **{**positions, **changes})
    save_bpe(folder, adds_bos=adds_bos, bos=bos)
    return model


def save_data(folder: Path, items: int = 8) -> Path:
    """`lambada`, `hellaswag` and `gsm8k` files and a text, as `--data` expects them."""
    rng = random.Random(1)
    lambada = [{"text": f"{sentence(rng, 4 + 3 * i)} {rng.choice(WORDS)}"} for i in range(items)]
    hellaswag = [
        {
            "activity_label": "Walking [title] home", "ctx_a": sentence(rng, 3 + 2 * i), "ctx_b": sentence(rng, 2),
            "endings": [sentence(rng, rng.randint(1, 9)) for _ in range(4)], "label": str(i % 4),
        }
        for i in range(items)
    ]  # fmt: skip
    gsm8k = [
        {"question": f"{sentence(rng, 3 + i)}?", "answer": f"{sentence(rng, 3)}\n#### {rng.randint(1, 99)}"}
        for i in range(items + 6)
    ]
    files = {
        "lambada/test.jsonl": lambada,
        "hellaswag/validation.jsonl": hellaswag,
        "gsm8k/train.jsonl": gsm8k[:6],
        "gsm8k/test.jsonl": gsm8k[6:],
    }
    for name, records in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text/wikitext2-test.txt").write_text("\n".join(sentence(rng, 30) for _ in range(80)), encoding="utf-8")
    return folder
