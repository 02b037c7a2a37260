"""Training chats as tokens, and the mask of those that carry loss.

A mask is right only if a template keeps earlier tokens as they were; other templates are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np

from tandem.data.renderer import CHUNK, ChatRenderer, first_difference
from tandem.data.unknown_tokens import UnknownTokens
from tandem.plugins.offline.rows import NOTHING, TemplateInputs
from tandem.runtime.errors import UserError
from tandem.types import Array, Message

Loss = Literal["assistant", "last", "all"]  # see training_samples
Prefix = tuple[Sequence[Message], bool]  # a chat, with the header of the assistant's turn


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A chat's text up to some message, and its tokens."""

    text: str
    tokens: Array  # int64 [T]


def training_samples(
    renderer: ChatRenderer,
    chats: Sequence[Sequence[Message]],
    loss: Loss = "assistant",
    key: str = "sft.train",
    inputs: Sequence[TemplateInputs] = (),
) -> list[tuple[Array, Array]]:
    """Return (tokens int64 [T], loss_mask bool [T]) of every whole chat; the mask marks the
    tokens that carry loss. inputs: what the template reads beside each chat.

    "assistant": the assistant's text, in every turn but those of weight 0. A turn's loss covers the
    tokens that an engine would have sampled: from the end of the turn's header to the first stop
    token, that one included. "last": its last turn only. "all": every token but the first, which
    nothing predicts. Raises UserError if the template does not keep earlier tokens as they
    were; for "last", if it does not keep the last turn's prompt and text.
    """
    unknown, samples, at = UnknownTokens(renderer.tokenizer), [], 0
    for given, alike in groupby(inputs or [NOTHING] * len(chats)):
        end = at + len(list(alike))
        for start in range(at, end, CHUNK):
            chunk = chats[start : min(start + CHUNK, end)]
            samples += _sample_chunk(renderer, chunk, loss, unknown, given)
        at = end
    unknown.warn("chats", key)
    return samples


def _sample_chunk(
    renderer: ChatRenderer,
    chats: Sequence[Sequence[Message]],
    loss: Loss,
    unknown: UnknownTokens,
    given: TemplateInputs,
) -> list[tuple[Array, Array]]:
    turns = [[i for i, m in enumerate(chat) if m["role"] == "assistant"] for chat in chats]
    if loss == "last":
        turns = [at[-1:] for at in turns]
    else:
        each = zip(turns, chats, strict=True)
        turns = [[i for i in at if chat[i].get("weight") != 0] for at, chat in each]
    parts = list[list[Prefix]]()
    for messages, at in zip(chats, turns, strict=True):
        # up to the header of each of the assistant's turns and up to its end; then the whole chat
        parts.append([(messages[: i + ended], not ended) for i in at for ended in (False, True)])
        if at[-1:] != [len(messages) - 1]:
            parts[-1].append((messages, False))
    prefixes, texts_of = [prefix for chat in parts for prefix in chat], {}
    for open_turn in (True, False):
        alike = [chat for chat, is_open in prefixes if is_open == open_turn]
        texts_of[open_turn] = iter(renderer.texts(alike, open_turn, given.tools, given.variables))
    ordered = [next(texts_of[open_turn]) for _, open_turn in prefixes]
    rows = renderer.encode_all(ordered, [chat for chat, _ in prefixes])
    renderings = map(_Rendering, ordered, rows)
    samples, texts = [], []
    for at, chat in zip(turns, parts, strict=True):
        rendered = [next(renderings) for _ in chat]
        tokens, loss_mask = _sample(renderer, at, rendered)
        texts.append(rendered[-1].text)
        if loss == "all":
            loss_mask = np.arange(len(tokens)) > 0
        samples.append((tokens, loss_mask))
    unknown.look(texts, [tokens for tokens, _ in samples])
    return samples


def _sample(
    renderer: ChatRenderer, turns: list[int], renderings: list[_Rendering]
) -> tuple[Array, Array]:
    """Return (tokens int64 [T], loss_mask bool [T]) of the last rendering, with loss on the
    sampled tokens of these turns."""
    for n, (before, after) in enumerate(pairwise(renderings)):
        _require_prefix(renderer, before, after, turns[n // 2], n)
    tokens = renderings[-1].tokens
    loss_mask = np.zeros(len(tokens), bool)
    for n, turn in enumerate(turns):
        start, end = len(renderings[2 * n].tokens), len(renderings[2 * n + 1].tokens)
        # a template may end a turn by the token that begins the next message
        end += end < len(tokens) and tokens[end] in renderer.stop_token_ids
        loss_mask[start : renderer.end_of_sampling(tokens, start, end, turn)] = True
    return tokens, loss_mask


def _require_prefix(
    renderer: ChatRenderer, before: _Rendering, after: _Rendering, turn: int, n: int
) -> None:
    """Raise UserError with the first difference unless before's tokens are after's first ones.

    Of the pairs n, even ones add the message of the turn to its header, odd ones add the next
    messages.
    """
    if np.array_equal(before.tokens, after.tokens[: len(before.tokens)]):
        return
    if after.text.startswith(before.text):
        what = (
            "a message merges with the chat template's text before it, so its first token is "
            "never sampled"
        )
        advice = "strip the spaces and line ends at the start of that message"
        if not after.text[len(before.text) :][:1].isspace():
            advice = "name a template in data.chat_template that writes no space before it"
    elif n % 2 == 0:
        what = (
            "the chat template writes the assistant's header differently for a prompt and for "
            "a whole chat"
        )
        advice = "make the template write the same header with add_generation_prompt as without"
    else:
        what = "the chat template rewrites an earlier turn when a later one follows"
        advice = "keep one assistant message a chat, or make the template keep earlier turns"
    at = first_difference(before.tokens, after.tokens)
    raise UserError(
        what,
        where=f"{renderer.template.where}, message {turn + 1 + n % 2}, token {at}",
        found=renderer.around(after.tokens, at),
        expected=renderer.around(before.tokens, at),
        next=advice,
    )
