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
    vocabulary = {
        token: i for i, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return lambda tokens: tokenizer.decode(tokens.tolist()), frozenset(
        range(len(pieces), len(pieces) + 256)
    )


DECODERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
SMALL = st.integers(0, 5)
CHARACTERS = st.sampled_from("aé€🦀\ufffd ").flatmap(
    lambda c: st.just([6 + byte for byte in c.encode()])
)
FALLBACK_TOKENS = st.lists(
    st.one_of(SMALL.map(lambda t: [t]), CHARACTERS, st.integers(6, 261).map(lambda t: [t]))
)
BYTES = st.lists(
    st.one_of(
        st.sampled_from("aé€🦀\ufffd ").map(lambda c: list(c.encode())),
        st.integers(0, 255).map(lambda b: [b]),
    )
)
