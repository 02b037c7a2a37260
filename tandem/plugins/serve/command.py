"""`tandem serve`: a model directory behind an OpenAI-compatible server. The cheapest check comes
first, the weights last."""

import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tandem.cli.arguments import argument, command_of, unset
from tandem.config.episodes import Model, Rollout
from tandem.config.schema import Config
from tandem.plugins.serve.requests import Served
from tandem.registry import find
from tandem.serve.listen import address_errors, bound, require_token, url_of
from tandem.serve.openai import ApiError

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
        from tandem.plugins.serve.json_masks import json_mask
        from tandem.plugins.serve.texts import RendererTexts

        engine, renderer = _load(options)
        texts = RendererTexts(renderer)
        with suppress(ApiError):  # without llguidance; it reads the vocabulary for a second
            json_mask(texts, {"type": "object"}, engine.model.config.vocab_size)
        server = EngineServer(
            engine,
            texts,
            served(options, engine),
            ready=lambda: print(f"serving {options.model} on {url_of(sock)}", flush=True),
            api_key=options.api_key,
            takes_updates=options.allow_weight_updates,
        )
        with address_errors(options.host, options.port):  # another server may have been faster
            sock.listen()
        gc.collect()
        gc.freeze()  # a full collection of all loaded objects stops everything for 0.3 s
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
            server.run(sockets=[sock])


command = command_of(Options, serve)


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
