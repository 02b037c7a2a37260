"""`tandem serve`: a model directory behind an OpenAI-compatible server. The cheapest check comes
first, the weights last."""

import gc
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Option

from tandem.cli.arguments import argument, command_of, unset
from tandem.config.episodes import Model, Rollout
from tandem.config.schema import Config
from tandem.plugins.serve.json_masks import JsonGrammars, JsonMask
from tandem.plugins.serve.requests import Served
from tandem.registry import find
from tandem.runtime.errors import UserError
from tandem.serve.listen import address_errors, bound, require_token, url_of
from tandem.serve.openai import ApiError
from tandem.types import Array, Message, Tool

if TYPE_CHECKING:  # torch, transformers and the server come after the checks that need none of them
    from tandem.data.renderer import ChatRenderer
    from tandem.engine.engine import Engine

CHUNK_TOKENS = 256  # of a pass: how long a prompt may hold up the streams of other requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options."""

    model: Annotated[str, argument(help="Hugging Face model directory or hub name")]
    host: Annotated[
        str, Option(help="address to listen on; one that other machines reach needs a key")
    ] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = 8000
    api_key: Annotated[str, unset(envvar="TANDEM_API_KEY", help="key that clients must send")] = ""
    served_name: Annotated[str, unset(help="name of the model for clients; default: MODEL")] = ""
    cache_mb: Annotated[int, Option(min=1, help="budget of the key/value cache, MiB")] = 1024
    max_batch: Annotated[int, Option(min=1, help="most sequences decoded together")] = 64
    max_queue: Annotated[
        int, Option(min=1, help="most sequences that wait; more are refused with 429")
    ] = 256
    max_new_tokens_default: Annotated[
        int, Option(min=1, help="completion length of requests without max_tokens")
    ] = 256
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N")] = "auto"
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16")] = "auto"
    chat_template: Annotated[
        str, unset(help="Jinja file with the chat template, for a model without one")
    ] = ""
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="run the Python files of the model directory")
    ] = False
    allow_weight_updates: Annotated[
        bool, Option(help="let clients have it load new weights, as `tandem train` does")
    ] = False
    train: Annotated[
        bool, Option("--train", help="let clients of Tinker's API train and sample, in its place")
    ] = False
    folder: Annotated[Path, Option(help="with --train: where clients' checkpoints go")] = Path(
        "runs/tinker"
    )


def serve(options: Options) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs. With --train, Tinker's clients
    train it: docs/guide/serving.md."""
    require_token(options.host, options.api_key, "TANDEM_API_KEY")
    with bound(options.host, options.port) as sock:
        if options.train:
            return find("training_servers", "tinker", key="--train")(options, sock)
        from tandem.plugins.serve.endpoints import EngineServer

        engine, renderer = _load(options)
        texts = RendererTexts(renderer)
        texts.prepare_json(engine.model.config.vocab_size)
        server = EngineServer(
            engine,
            texts,
            served(options, engine),
            ready=lambda: print(f"serving {options.model} on {url_of(sock)}", flush=True),
            api_key=options.api_key,
            update=load_weights if options.allow_weight_updates else None,
        )
        with address_errors(options.host, options.port):  # another server may have been faster
            sock.listen()
        gc.collect()
        gc.freeze()  # a full collection of all loaded objects stops everything for 0.3 s
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
            server.run(sockets=[sock])


command = command_of(Options, serve)


def load_weights(path: str) -> Callable[[Any, int], None]:
    """Read a safetensors file; return what has an engine run its weights as a version. Both raise
    UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if not Path(path).is_file():  # to open a pipe would wait for who writes it
            raise OSError("no regular file")
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            "the weights cannot be read",
            where=path,
            found=str(error),
            expected="a safetensors file on a disk that trainer and server share",
        ) from None
    return lambda engine, version: engine.apply(version, lambda: engine.model.load_weights(weights))


def _load(options: Options) -> "tuple[Engine, ChatRenderer]":
    from tandem.data.renderer import load_renderer
    from tandem.jobs.engines import build_engine, prepare_process, probe_exactness
    from tandem.model.config_file import check_model
    from tandem.model.load import load_model
    from tandem.model.placement import place_models

    place = place_models(options.device, options.dtype)
    config = Config(
        model=Model(
            path=options.model,
            trust_remote_code=options.trust_remote_code,
            device=str(place.device),
            dtype=place.dtype_name,
        ),
        rollout=Rollout(cache_mb=options.cache_mb, max_batch=options.max_batch),
    )
    prepare_process(config)
    check_model(options.model)
    renderer = load_renderer(options.model, options.chat_template)
    model = load_model(options.model, place=place)
    sizes = {"max_queue": options.max_queue, "chunk_tokens": CHUNK_TOKENS}
    report = partial(print, file=sys.stderr)
    probe_exactness(config, model, report, alone=False)  # a trainer may ask for its tokens
    return build_engine(config, model, renderer, **sizes), renderer


def served(options: Options, engine: "Engine") -> Served:
    from tandem.model.paged_attention import PAGE
    from tandem.model.rope import positions_of

    config, room = engine.model.config, engine.cache.count * PAGE
    positions = positions_of(config)
    if room < positions:
        print(
            f"the cache of {options.cache_mb} MiB holds {room:,} tokens, the model's context is "
            f"{positions:,}; more with --cache-mb",
            file=sys.stderr,
        )
    return Served(
        name=options.served_name or options.model,
        context=min(positions, room),
        vocabulary=config.vocab_size,
        default_max_tokens=options.max_new_tokens_default,
        max_choices=options.max_queue,
    )


class RendererTexts:
    """A ChatRenderer for the server. Implements serve.requests.ChatTokenizer."""

    def __init__(self, renderer: "ChatRenderer"):
        tokenizer: Any = renderer.tokenizer
        self.stop_token_ids, self.vocabulary = renderer.stop_token_ids, renderer.vocabulary
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.byte_tokens = frozenset(
            i for token, i in vocabulary.items() if re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        )
        self._renderer, self._tokenizer = renderer, tokenizer
        self._texts: dict[int, str] = {}
        self._grammars: JsonGrammars | None = None  # made for the first that asks

    def encode(self, text: str) -> Array:
        """Encode plain text as int64 [T], with the begin-of-text token if the tokenizer writes
        one, and once if the text begins with it too."""
        ids = self._tokenizer(text, verbose=False)["input_ids"]
        twice = ids[:2] == [self._tokenizer.bos_token_id] * 2
        return np.array(ids[twice:], np.int64)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]
    ) -> str:
        return self._renderer.texts([messages], True, tools, variables)[0]

    def encode_chat(self, text: str) -> Array:
        return self._renderer.encode(text)

    def json_mask(
        self, schema: dict[str, Any], vocabulary: int, field: str = "response_format"
    ) -> JsonMask:
        """Compile the JSON schema that a field of a request wants to its mask. Raises ApiError."""
        if self._grammars is None:
            tokenizer, ends = self._tokenizer, self.stop_token_ids
            self._grammars = JsonGrammars(tokenizer, ends, vocabulary, self.token_text)
        return self._grammars.mask(schema, field)

    def prepare_json(self, vocabulary: int) -> None:
        """Make a first mask, if llguidance is installed: it reads the vocabulary, which holds up
        everything for a second."""
        with suppress(ApiError):
            self.json_mask({"type": "object"}, vocabulary)

    def decode(self, tokens: Array) -> str:
        return self._renderer.decode(tokens)

    def token_text(self, token: int) -> str:
        """Decode one token, special ones too, as inside a text: a leading space is kept."""
        if token not in self._texts:
            once, twice = (
                self._tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)
                for n in (1, 2)
            )
            self._texts[token] = twice[len(once) :]
        return self._texts[token]
