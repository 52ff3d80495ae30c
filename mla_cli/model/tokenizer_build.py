"""Tokenizers built from their parts: byte-level BPE (GPT-2 and its heirs), and sentencepiece BPE with byte fallback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

# The expressions these vocabularies were trained with, as their tokenizer.json files hold them.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# A word is capitals and then small letters; GPT-4o's also takes the English endings with it.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN_SPLIT = _WORDS % ("", "") + r"|\p{N}" + _REST
GPT4O_SPLIT = _WORDS % (_ENDINGS, _ENDINGS) + r"|\p{N}{1,3}" + _REST
BLOOM_SPLIT = " ?[^(\\s|.,!?…。，、।۔،)]+"
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = "▁"


class PieceKind(IntEnum):
    """What a vocabulary entry is; sentencepiece and GGUF use the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    splits: Sequence[str] = (GPT2_SPLIT,),
    nfc: bool = False,
    ignore_merges: bool = False,
    add_prefix_space: bool = False,
) -> Tokenizer:
    """Byte-level BPE whose text is first cut by each expression of `splits` in turn.

    Args:
        nfc: normalise to NFC first (Qwen).
        ignore_merges: a piece that is in the vocabulary is taken whole (Llama 3).
    """
    tokenizer = Tokenizer(BPE(vocab=dict(vocab), merges=list(merges), fuse_unk=False, ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    # The prefix space has to be there before the text is cut, so GPT-2's own expression stays inside ByteLevel.
    own = tuple(splits) == (GPT2_SPLIT,)
    cuts = [] if own else [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=own)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes]) if cuts else to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, unknown: str | None
) -> Tokenizer:
    """The BPE of a sentencepiece model; normalizer and pre-tokenizer are left to the caller."""
    vocab = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(
        BPE(vocab=vocab, merges=_merges(tokens, scores, kinds), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )


def sentencepiece_decoder(*, prefix_space: bool) -> decoders.Decoder:
    """Back from `▁` and `<0x..>` to text, without the space that was put in front."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)


def add_ends(tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make the tokenizer put BOS before and EOS after a text."""
    single = " ".join([*([f"{bos[0]}:0"] if bos else []), "$A:0", *([f"{eos[0]}:0"] if eos else [])])
    pair = " ".join([single, *([f"{bos[0]}:1"] if bos else []), "$B:1", *([f"{eos[0]}:1"] if eos else [])])
    ends = list(dict.fromkeys(end for end in (bos, eos) if end))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)


def added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[AddedToken]:
    """The entries that are matched whole in a text: control tokens (special) and user-defined ones."""
    whole = (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    return [
        AddedToken(token, normalized=False, special=kind == PieceKind.CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in whole and token
    ]


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    # sentencepiece joins the neighbours whose joined piece scores best; merges in order of score do the same.
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == PieceKind.NORMAL}
    found = []
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[i], len(left), len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
