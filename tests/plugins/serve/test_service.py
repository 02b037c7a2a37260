"""The engine's thread: weights that change under a client, and a stop while one waits."""

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tandem.plugins.serve.service import EngineService, EngineStopped
from tests.support.engines import engine_of, request
from tests.support.tiny import exact_model
from tests.support.waiting import WAIT_S


@asynccontextmanager
async def service_of(engine):
    service = EngineService(engine)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def held_at(engine, count):
    """The event that the engine waits for when a request has so many tokens."""
    step, go, given = engine.step, threading.Event(), 0

    def held():
        nonlocal given
        if given == count:
            go.wait(WAIT_S)
        ready = step()
        given = max((len(running.tokens) for running in ready), default=given)
        return ready

    engine.step = held
    return go


def test_client_gets_every_token_once_across_new_weights():
    model = exact_model("qwen3")
    load = partial(model.load_weights, exact_model("qwen3", seed=1).named_weights())

    async def life():
        go = held_at(engine := engine_of(model), 3)
        async with service_of(engine) as service:
            generation = await service.submit([request(max_new_tokens=40)])
            tokens, versions, completion = [], [], None
            async for [update] in generation:
                tokens += update.tokens
                versions += update.weight_versions
                completion = update.completion
                if len(tokens) == 3:
                    apply = service.ask(lambda engine: engine.apply(1, load))
                    applied = asyncio.create_task(apply)
                    await asyncio.sleep(0)  # now it is asked for
                    go.set()
                    await applied
            return tokens, versions, completion

    tokens, versions, completion = asyncio.run(asyncio.wait_for(life(), WAIT_S))
    assert tokens == completion.tokens.tolist() and len(tokens) == 40
    assert versions == completion.weight_versions.tolist() == sorted(versions)
    assert set(versions) == {0}


def test_a_request_that_waits_while_the_service_stops_is_refused():
    async def life():
        go = held_at(engine := engine_of(), 1)
        async with service_of(engine) as service:
            await anext(await service.submit([request(max_new_tokens=4)]))
            waiting = asyncio.create_task(service.submit([request(max_new_tokens=4)]))
            await asyncio.sleep(0)  # now it is asked for
            stopping = asyncio.create_task(service.stop())
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(EngineStopped, match="is stopping"):
                await waiting
            await stopping

    asyncio.run(asyncio.wait_for(life(), WAIT_S))
