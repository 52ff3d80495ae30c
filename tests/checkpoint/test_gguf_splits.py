"""How text is cut before byte-level BPE, by the name that a GGUF file gives: as those tokenizers' own files cut it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mla_cli.checkpoint.gguf_tokenizer import write_tokenizer

TEXT = "It's HelloWORLD's 12345, (x) über\n\n  end"
# `Ġ` is a space, `Ċ` a new line, `Ã¼` the two bytes of ü.
EXPECTED = {
    "olmo": "It|'s|ĠHelloWORLD|'s|Ġ12345|,|Ġ(|x|)|ĠÃ¼ber|ĊĊĠ|Ġend",
    "starcoder": "It|'s|ĠHelloWORLD|'s|Ġ|1|2|3|4|5|,|Ġ(|x|)|ĠÃ¼ber|ĊĊĠ|Ġend",
    "falcon": "It|'|s|ĠHelloWORLD|'|s|Ġ|123|45|,|Ġ|(|x|)|ĠÃ¼ber|ĊĊĠ|Ġend",
    "bloom": "It's|ĠHelloWORLD's|Ġ12345|,Ġ(|x|)|ĠÃ¼ber|ĊĊĠ|Ġend",
    "qwen2": "It|'s|ĠHelloWORLD|'s|Ġ|1|2|3|4|5|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
    "stablelm2": "It|'s|ĠHelloWORLD|'s|Ġ|1|2|3|4|5|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
    "llama-bpe": "It|'s|ĠHelloWORLD|'s|Ġ|123|45|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
    "dbrx": "It|'s|ĠHelloWORLD|'s|Ġ|123|45|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
    "tekken": "It|'s|ĠHello|WORLD|'s|Ġ|1|2|3|4|5|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
    "gpt-4o": "It's|ĠHello|WORLD's|Ġ|123|45|,|Ġ(|x|)|ĠÃ¼ber|ĊĊ|Ġ|Ġend",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_text_is_cut_as_the_file_says(tmp_path: Path, name: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    write_tokenizer(metadata, 3, tmp_path, tmp_path / "model.gguf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = tokenizer.normalizer.normalize_str(TEXT) if tokenizer.normalizer else TEXT
    assert "|".join(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)) == EXPECTED[name]
