"""Tools of servers that speak the Model Context Protocol over stdio: the environment `mcp`.

For anyone who has tools in an MCP server already. The recipe names the servers as other clients do:

    env.name = "mcp"
    env.options.servers.files = {command = "python", args = ["server.py"]}
    env.options.shared = false

The model's tools are those that the servers list. Other options, and the end of an episode, are
those of `tools`. An error of a tool, a missing answer (call_timeout_s) and the death of a server
are told to the model; the next call starts a new process. Only text reaches the model.

A server is a process of each episode, from its first call on. With `shared` it is one process of
the run, for tools that keep nothing from call to call. Episodes are repeatable if the servers are.
A server is trusted: it runs as you. It plugs in as envs of tandem/registry.py. Extra: `mcp`.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from subprocess import DEVNULL
from typing import Any

from tandem.envs.tools import NamedTool, ToolEnv, ToolUnavailable
from tandem.model.tool_calls import Call, argument_types, with_types
from tandem.runtime.errors import UserError, not_installed
from tandem.types import Tool

try:
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp_types import CONNECTION_CLOSED
except ModuleNotFoundError as error:
    raise not_installed("mcp", "mcp", where="env.name = mcp") from error

START_S = 30.0  # for a server to list its tools
Servers = Mapping[str, Mapping[str, Any]]


class McpEnv(ToolEnv):
    """One episode with the tools of servers. Parts are those of ToolEnv."""

    def __init__(
        self, servers: Servers, *, shared: bool = False, call_timeout_s: float = 30, **options: Any
    ):
        """Take the options: `servers` by any name, {command, args, env, cwd}; those of ToolEnv."""
        specs = [json.dumps(spec, sort_keys=True) for spec in servers.values()]
        tools = [
            NamedTool(name=name, schema=partial(dict, schema), call=partial(self.ask, spec, schema))
            for spec in specs
            for name, schema in list_tools(spec).items()
        ]
        super().__init__(tools, **options)
        self._call_timeout_s, self.stateless = call_timeout_s, shared
        self._connections: dict[str, _Connection] = _SHARED if shared else {}

    async def ask(self, spec: str, schema: Tool, call: Call) -> str:
        """Return the text of a server's answer. Raises ValueError in the model's terms."""
        if spec not in self._connections or self._connections[spec].over.is_set():
            self._connections[spec] = _Connection(spec)
        client = await asyncio.shield(self._connections[spec].client)
        given = with_types(call, argument_types(schema)).arguments
        try:
            result = await client.call_tool(call.name, given, self._call_timeout_s)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._connections[spec].over.set()
            raise ValueError(error.message) from None
        texts = [one.text if one.type == "text" else f"[{one.type}]" for one in result.content]
        if result.is_error:
            raise ValueError("\n".join(texts))
        return "\n".join(texts)

    async def close(self) -> None:
        if self._connections is not _SHARED:
            await asyncio.gather(*(one.end() for one in self._connections.values()))


class _Connection:
    """A server's process, until `end` or its death, when it is `over`. Its session lives in a task
    of its own, as a context must be left in the task that entered it."""

    def __init__(self, spec: str):
        self.over = asyncio.Event()
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(spec))

    async def _hold(self, spec: str) -> None:
        try:
            async with _client(spec) as client:
                self.client.set_result(client)
                await self.over.wait()
        except Exception as error:  # a server is any program
            self.over.set()
            if not self.client.done():
                self.client.set_exception(ToolUnavailable(f"{spec}: {error!r}"))

    async def end(self) -> None:
        self.over.set()
        await asyncio.shield(self._task)


_SHARED: dict[str, _Connection] = {}  # of this process


def _client(spec: str) -> Client:
    return Client(stdio_client(StdioServerParameters.model_validate_json(spec), DEVNULL))


@cache  # a server is started once to look at; the others are started for episodes
def list_tools(spec: str) -> dict[str, Tool]:
    async def ask() -> list[Any]:
        async with asyncio.timeout(START_S), _client(spec) as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools

    with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
        try:
            tools = thread.submit(asyncio.run, ask()).result()
        except Exception as error:  # a server is any program
            what, where = "an MCP server lists no tools", f"env.options.servers: {spec}"
            raise UserError(what, where=where, found=repr(error), next="start it") from error
    named = ((t, {"name": t.name, "description": t.description or ""}) for t in tools)
    return {
        tool.name: {"type": "function", "function": {**about, "parameters": tool.input_schema}}
        for tool, about in named
    }
