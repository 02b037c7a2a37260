"""A tiny model for a server, and an engine of its own to compare with."""

import numpy as np

from tandem.data.renderer import load_renderer
from tandem.engine.engine import Engine
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.plugins.serve.command import Options, served
from tandem.plugins.serve.texts import RendererTexts
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams


class TinyServer:
    """A tiny model that is served, and an engine of its own to compare with."""

    def __init__(self, folder):
        make_tiny(folder, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64, max_tokens=256)
        self.renderer, model = load_renderer(str(folder)), load_model(str(folder))
        self.engine, self.twin = (self.new_engine(model) for _ in range(2))
        self.texts = RendererTexts(self.renderer)
        sizes = {"cache_mb": 8, "max_new_tokens_default": 24}
        self.served = served(Options(model=str(folder), served_name="tiny", **sizes), self.engine)

    def new_engine(self, model):
        return Engine(model, self.renderer.decode, cache_bytes=8 << 20, max_batch=64, max_queue=256)

    def complete(self, prompt, *, seed, choice=0, **params):
        """Return the engine's result for the request without a server."""
        params = SamplingParams(**{"stop_token_ids": self.renderer.stop_token_ids, **params})
        key, prompt = address(seed, "serve", choice), np.array(prompt, np.int64)
        return self.twin.generate([Request(key=key, prompt=prompt, params=params)])[0]
