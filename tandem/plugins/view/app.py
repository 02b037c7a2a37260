"""The server of `tandem view`: static files and JSON, read-only, on starlette and uvicorn.

    GET /                    static/index.html and beside it: the pages
    GET /api/runs            list           /api/series   columns of numbers, thinned
        /api/config          of runs        /api/episodes a page of them; /api/export all of them
        /api/episode         one            /api/step     what it trained on
        /api/diff            of two runs    /api/image    a file of those that it read
        /api/events          server-sent: which run has news

Functions that read files run in threads. Knows no format of a file: that is the room's others.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.plugins.view.episode import read_episode, read_image, read_step
from tandem.plugins.view.episodes import KINDS, EpisodeTable
from tandem.plugins.view.runs import Run, Runs
from tandem.run_folder.diff import compare_runs
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tandem.serve.app import Server, make_app
from tandem.serve.openai import ApiError

STATIC = Path(__file__).parent / "static"
OPEN_TABLES = 4  # runs whose episodes are kept in memory
FORMATS = ("jsonl", "parquet")  # of an export
LIMIT = 500  # episodes of a page
POLL_S, LIFE_S, FIND_S = 0.25, 15.0, 2.0  # of the events: look, say that one lives, find new runs

COOKIE = "tandem_view"  # no script reads it
# No script, style or address but this server's own; no text becomes markup (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Answer = Callable[[Request], Any]  # JSON or a response, from a thread


class Api:
    """The answers, over the runs of a folder."""

    def __init__(self, root: Path):
        self.runs = Runs(root)
        self.table = lru_cache(OPEN_TABLES)(lambda run: EpisodeTable(run.folder / "episodes"))

    def routes(self) -> list[Route]:
        answers: dict[str, Answer] = {
            "runs": self.list_runs,
            "series": self.series,
            "config": self.config,
            "episodes": self.episodes,
            "episode": self.episode,
            "step": self.step,
            "diff": self.diff,
            "export": self.export,
            "image": self.image,
        }
        return [
            *(Route(f"/api/{name}", _endpoint(answer)) for name, answer in answers.items()),
            Route("/api/events", self.events),
        ]

    def list_runs(self, request: Request) -> Any:
        return {"root": str(self.runs.root), "runs": [run.summary() for run in self.runs.list()]}

    def series(self, request: Request) -> Any:
        query = request.query_params
        points = int(query.get("points", 2000))
        first, last = float(query.get("from", -math.inf)), float(query.get("to", math.inf))
        found: dict[str, Any] = {}
        for run in self._asked(request):
            keys = [key for key in query.getlist("key") if key in run.names()]
            series = {key: run.series(key, first=first, last=last, points=points) for key in keys}
            state = run.state(*run.progress(run.status()))
            found[run.name] = {"names": run.names(), "series": series, **run.messages(state)}
        return found

    def config(self, request: Request) -> Any:
        values = {run.name: run.config_values() for run in self._asked(request)}
        keys = sorted({key for one in values.values() for key in one})
        different = [k for k in keys if len({repr(v.get(k)) for v in values.values()}) > 1]
        return {"keys": keys, "values": values, "different": different}

    def episodes(self, request: Request) -> Any:
        query, [run] = request.query_params, self._asked(request, 1)
        offset, limit = max(0, int(query.get("offset", 0))), int(query.get("limit", 50))
        return self.table(run).page(query, offset, min(max(1, limit), LIMIT))

    def episode(self, request: Request) -> Any:
        query, [run] = request.query_params, self._asked(request, 1)
        kind = query.get("kind", "train")
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
        return read_episode(run, kind, int(query.get("step", "")), int(query.get("row", "")))

    def step(self, request: Request) -> Any:
        [run] = self._asked(request, 1)
        return read_step(run, self.table(run), int(request.query_params.get("step", "")))

    def diff(self, request: Request) -> Any:
        a, b = self._asked(request, 2)
        comparison = compare_runs(open_past(a.folder), open_past(b.folder))
        return {"a": a.name, "b": b.name, **asdict(comparison)}

    def _asked(self, request: Request, count: int | None = None) -> list[Run]:
        """Return the runs of an address. Raises KeyError, and ValueError for another number."""
        names = request.query_params.getlist("run")
        if count not in (None, len(names)):
            raise ValueError(f"the address names {len(names)} runs; expected {count}, as run=NAME")
        return [self.runs.get(name) for name in names]

    def export(self, request: Request) -> Response:
        """Send the episodes of a query as a file."""
        [run] = self._asked(request, 1)
        query, table = request.query_params, self.table(run)
        if (kind := query.get("format", "jsonl")) not in FORMATS:
            raise ValueError(f"format is {kind!r:.40}; expected one of {', '.join(FORMATS)}")
        name = f"{run.name.replace('/', '-')}-episodes.{kind}"
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
        headers = {"Content-Disposition": f'attachment; filename="{plain}"'}
        if kind == "jsonl":
            lines = table.export_lines(query)
            return StreamingResponse(lines, media_type="application/jsonl", headers=headers)
        parts = _parquet(lambda sink: table.export_parquet(query, sink))
        return StreamingResponse(
            parts, media_type="application/vnd.apache.parquet", headers=headers
        )

    def image(self, request: Request) -> Response:
        """Send an image by the name that its tokens have."""
        [run] = self._asked(request, 1)
        data, media_type = read_image(run, request.query_params.get("name", ""))
        return Response(data, media_type=media_type)

    async def events(self, request: Request) -> Response:
        """Announce, until the client leaves, which runs have written something."""
        return StreamingResponse(
            self._news(request.app.state),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    async def _news(self, state: Any) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        runs = await run_in_threadpool(self.runs.list)
        stamps = _stamps(runs)
        found_at = sent_at = clock()
        yield _event({"runs": []})
        while not state.closing:
            await asyncio.sleep(POLL_S)
            if clock() - found_at > FIND_S:
                runs, found_at = await run_in_threadpool(self.runs.list), clock()
            now = await run_in_threadpool(_stamps, runs)
            news = [name for name in {**stamps, **now} if stamps.get(name) != now.get(name)]
            stamps = now
            if news or clock() - sent_at > LIFE_S:
                sent_at = clock()
                yield _event({"runs": news})


def _stamps(runs: list[Run]) -> dict[str, Any]:
    return {run.name: run.stamp() for run in runs}


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _parquet(write: Callable[[Any], None]) -> Iterator[bytes]:
    """Yield the bytes of a file that is whole before the first of them."""
    with tempfile.TemporaryFile() as file:
        write(file)
        file.seek(0)
        while part := file.read(1 << 20):
            yield part


def _endpoint(answer: Answer) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            found = answer(request)
            return found if isinstance(found, Response) else _Json(found)
        except (KeyError, ValueError, OverflowError, UserError) as error:
            # a mistake in the address, or a damaged file of the run
            if isinstance(error, KeyError):
                return _Json({"error": f"not there: {error.args[0]}"}, 404)
            wrong = isinstance(error, ValueError | OverflowError)
            return _Json({"error": str(error)}, 400 if wrong else 422)

    return endpoint


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        # in ASCII, so half a surrogate pair can be sent; NaN is no JSON
        return json.dumps(_finite(content)).encode()


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): _finite(one) for name, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case None | str() | int():
            return value
    return str(value)


class _Headers:
    """ASGI middleware: adds the headers to every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


def _refused(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return _Json({"error": error.message}, error.status)
        case HTTPException():
            return _Json({"error": error.detail}, error.status_code)
    return _Json({"error": "the server failed on this request; its log says how"}, 500)


def make_server(root: Path, token: str, ready: Callable[[], None]) -> Server:
    """Make the server over a folder of runs; `run(sockets=[...])` serves until SIGINT, SIGTERM or
    `should_exit`. ready is called once it listens."""

    async def page(request: Request) -> Response:
        if not (token and request.query_params.get("token")):
            return FileResponse(STATIC / "index.html")
        # the token leaves the address, and stays in the cookie
        answer = Response(status_code=303, headers={"Location": "/"})
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return answer

    async def end_events() -> None:
        app.state.closing = True
        await asyncio.sleep(2 * POLL_S)

    files = Mount("/", StaticFiles(directory=STATIC))
    app = make_app(
        [*Api(root).routes(), Route("/", page), files],
        [Middleware(_Headers)],
        _refused,
        token=token,
        # of the address, or of the cookie
        sent=lambda request: (
            request.query_params.get("token") or request.cookies.get(COOKIE, "")
        ).encode(),
    )
    app.state.closing = False
    return Server(app, ready=ready, stop=end_events)
