"""The two kinds of decoders that models have, and tokens for them that form and break
characters."""

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models


def byte_level():
    """Every byte is a token, as in GPT-2, Llama 3 and Qwen."""
    return lambda tokens: bytes(tokens.tolist()).decode(errors="replace"), frozenset()


def byte_fallback():
    """Pieces with leading spaces and, for all else, single bytes that count only in whole runs, as
    in Llama 2."""
    pieces = ["▁", "▁der", "die", "▁das", "é", "<s>"]
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    single = frozenset(range(len(pieces), len(tokens)))
    return lambda tokens: tokenizer.decode(tokens.tolist()), single


DECODERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def one(least, most):
    """A part of one token."""
    return st.integers(least, most).map(lambda token: [token])


CHARACTERS = st.sampled_from("aé€🦀\ufffd ").map(lambda c: list(c.encode()))
FALLBACK = CHARACTERS.map(lambda part: [6 + byte for byte in part])
FALLBACK_TOKENS = st.lists(one(0, 5) | FALLBACK | one(6, 261))
BYTES = st.lists(CHARACTERS | one(0, 255))
