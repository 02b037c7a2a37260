"""The end of a completion, the same for every engine: stop tokens, stop strings, lengths, pauses.

Imports no torch, so that an engine of another library's environment shares it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from tandem.types import CompletionStop, SamplingParams

Decode = Callable[[np.ndarray], str]  # token ids int64 [N] to text
REPLACEMENT = "\ufffd"  # written by a decoder for bytes of an incomplete character
MARGIN = 8  # tokens


def find_ending(
    params: SamplingParams, tokens: Sequence[int], pause_at: int, decode: Decode
) -> tuple[str, CompletionStop] | None:
    """Return (text, stop reason) if a request's sampled tokens have ended with the last of them.

    pause_at: the number of tokens at which it pauses; 0: never.
    """
    if tokens[-1] in params.stop_token_ids:
        return _text(tokens[:-1], decode), "stop"
    full, paused = len(tokens) >= params.max_new_tokens, len(tokens) == pause_at
    if not params.stop and not full and not paused:
        return None
    if not full and not paused and _brings_no_stop(params.stop, tokens, decode):
        return None
    text = _text(tokens, decode)
    start = len(_text(tokens[: params.min_tokens], decode)) if params.min_tokens else 0
    # a stop string ends behind the text of the first min_tokens tokens
    stops = [text.find(stop, max(0, start + 1 - len(stop))) for stop in params.stop]
    if any(at >= 0 for at in stops):
        return text[: min(at for at in stops if at >= 0)], "stop"
    return (text, "length") if full else (text, "paused") if paused else None


def _brings_no_stop(stops: tuple[str, ...], tokens: Sequence[int], decode: Decode) -> bool:
    """Tell whether the last token, or the text of the last few, shows that no stop string ends in
    the last one, so that the whole text need not be decoded. False where that text is too short, or
    begins or ends within a character."""
    if not _may_end_stop(stops, tokens[-1], decode):
        return True
    longest = max(map(len, stops))
    tail = tokens[-longest - MARGIN :]
    text = _text(tail, decode)
    # a decoder may leave out the first character, a space
    enough = len(text) > longest + len(_text(tail[-1:], decode))
    return enough and REPLACEMENT not in text and not any(stop in text for stop in stops)


@lru_cache(1 << 16)
def _may_end_stop(stops: tuple[str, ...], token: int, decode: Decode) -> bool:
    """Tell whether a stop string may end in the text that a token brings: its own, with a space
    before it or broken characters."""
    text = _text([token], decode)
    brought = text + " " + REPLACEMENT
    return not text or REPLACEMENT in text or any(stop[-1] in brought for stop in stops)


def _text(tokens: Sequence[int], decode: Decode) -> str:
    return decode(np.array(tokens, np.int64))
