"""JSON that a request's `response_format` or `tool_choice` asks for: the tokens that may come next,
by llguidance.

    json_mask(schema) --> JsonMask.copy, one a choice --> allowed(tokens), once a token

A schema is compiled within llguidance's limits of work. White space is bounded, or a model could
write it up to its last token. Knows no engine and no requests.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.serve.openai import ApiError, Json
from tandem.types import Array, Tool

if TYPE_CHECKING:
    from tandem.plugins.serve.texts import RendererTexts

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def calls_schema(tools: Sequence[Tool], *, single: bool) -> Json:
    """Return the schema of a list of calls, {"name": ..., "arguments": {...}} each.

    The schemas of the tools' arguments stand at #/$defs/NUMBER, and their references begin there.
    """
    definitions, calls = {}, []
    for number, tool in enumerate(tools):
        function, place = tool["function"], f"#/$defs/{number}"
        own = json.dumps((function.get("parameters") or {}) | {"type": "object"})
        definitions[str(number)] = json.loads(own.replace('"$ref": "#', f'"$ref": "{place}'))
        call = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        closed = {"required": list(call), "additionalProperties": False}
        calls.append({"type": "object", "properties": call} | closed)
    count = {"minItems": 1} | ({"maxItems": 1} if single else {})
    return {"type": "array", "items": {"anyOf": calls}, "$defs": definitions} | count


class JsonMask:
    """The tokens of one completion that keep it a beginning of JSON by a schema, and at its end one
    of `ends`. Implements engine.masks.TokenMask.

    field: that asked for it; error: why a token could not be found; the completion is ended then.
    """

    def __init__(self, matcher: Any, vocabulary: int, ends: Sequence[int], field: str):
        self.error, self.field = "", field
        self._matcher, self._vocabulary, self._ends, self._read = matcher, vocabulary, ends, 0

    def copy(self) -> "JsonMask":
        return JsonMask(self._matcher.deep_copy(), self._vocabulary, self._ends, self.field)

    def allowed(self, tokens: Sequence[int]) -> Array:
        """Return what may follow the sampled tokens, as bool [V]."""
        if len(tokens) < self._read:  # the sequence began again, with other weights
            self._matcher.reset()
            self._read = 0
        self._matcher.consume_tokens(list(tokens[self._read :]))
        self._read = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        if self._matcher.is_error() or not allowed.any():
            self.error = self._matcher.get_error().partition("\n")[0]
            if missing := re.search("forced bytes: got (.+?);", self.error):
                self.error = f"this tokenizer has no token for {missing[1]}"
            elif self.error in ("", "NoExtensionBias"):
                self.error = "no token of this tokenizer can follow"
            allowed = np.zeros(self._vocabulary, bool)
            allowed[list(self._ends)] = True
        return allowed


def json_mask(
    texts: "RendererTexts", schema: Json, vocabulary: int, field: str = "response_format"
) -> JsonMask:
    """Compile the schema that a field of a request asks for. vocabulary: token ids of the model are
    below it. Raises ApiError for a schema that llguidance cannot hold a model to."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        message = f"{field} needs llguidance, here: pip install 'tandem-rl[json]'"
        raise ApiError(400, message, param=field, code="unsupported_parameter") from None
    options: Any = {"whitespace_pattern": WHITE_SPACE}
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except (ValueError, RecursionError) as error:
        raise _bad_schema(str(error), field) from None
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(_tokens(texts, vocabulary), grammar, log_level=0, limits=limits)
    mask = JsonMask(matcher, vocabulary, texts.stop_token_ids, field)
    (trial := mask.copy()).allowed(())
    if trial.error:
        raise _bad_schema(trial.error, field)
    return mask


def _bad_schema(found: str, field: str) -> ApiError:
    return ApiError(400, f"{field}: the schema cannot be used: {found}", param=field)


@lru_cache(maxsize=1)
def _tokens(texts: "RendererTexts", vocabulary: int) -> Any:
    """Read the vocabulary into llguidance; takes a second or more, all with the interpreter."""
    from llguidance import LLTokenizer
    from llguidance.hf import from_tokenizer

    size: Any = {"n_vocab": vocabulary, "eos_token": list(texts.stop_token_ids)}
    try:
        return from_tokenizer(texts.tokenizer, **size)
    except ValueError:  # a decoder that it does not know: tokens are plain texts
        return LLTokenizer(_PlainTokens(texts), **size)


class _PlainTokens:
    """A tokenizer whose tokens are texts, as llguidance.TokenizerWrapper has it."""

    is_tokenizer_wrapper = True

    def __init__(self, texts: "RendererTexts"):
        tokenizer = self._tokenizer = texts.tokenizer
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.special_token_ids = [token for token, about in added.items() if about.special]
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.tokens = [texts.token_text(token).encode() for token in range(len(tokenizer))]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
