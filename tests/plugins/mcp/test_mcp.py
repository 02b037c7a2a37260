"""Tools of an MCP server over stdio, written with the official SDK. Skipped where it is absent."""

import asyncio
import os
import sys

import pytest

pytest.importorskip("mcp")

from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.mcp import McpEnv
from tandem.runtime.errors import UserError
from tandem.runtime.processes import descendants

SERVER = '''
import os, time
from mcp.server.mcpserver import MCPServer

server, calls = MCPServer("tests"), []

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    calls.append(a)
    return a + b

@server.tool()
def calls_so_far() -> int:
    """Counts the calls of `add`."""
    return len(calls)

@server.tool()
def die() -> str:
    """Ends its process."""
    os._exit(3)

@server.tool()
async def wait() -> str:
    """Never answers."""
    import asyncio
    await asyncio.Event().wait()

server.run()
'''


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return {"tests": {"command": sys.executable, "args": [str(file)]}}


def say(name, **arguments):
    return write_calls([Call(name=name, arguments=arguments)])


def play(envs, *turns):
    """Texts that the model reads after each turn, and the parts, of one episode after the other."""

    async def episode(env):
        try:
            observed = [await env.step(turn) for turn in turns]
            return [[m["content"] for m in one.messages] for one in observed], env.parts()
        finally:
            await env.close()

    async def all_of_them():
        return [await episode(env) for env in envs]

    return asyncio.run(all_of_them())


def test_tools_are_those_that_the_server_lists(servers):
    tools = [tool["function"] for tool in McpEnv(servers).tools]
    assert [tool["name"] for tool in tools] == ["add", "calls_so_far", "die", "wait"]
    assert tools[0]["description"] == "Adds two numbers."
    assert tools[0]["parameters"]["required"] == ["a"]


def test_calls_go_to_the_server_and_what_fails_is_told(servers):
    turns = [
        say("add", a=1, b=2),
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        say("add", a="one"),
        say("wait"),
        say("calls_so_far"),
        say("die"),
        say("calls_so_far"),
        "the end",
    ]
    [(read, parts)] = play([McpEnv(servers, call_timeout_s=3.0)], *turns)
    refused = read.pop(2)
    assert "valid integer" in refused[0]
    assert read == [
        ["3"],
        ["8"],
        ["error: Request 'tools/call' timed out"],
        ["2"],
        ["error: Connection closed"],
        ["0"],  # of a new process
        [],
    ]
    assert parts == {"tool_calls": 4.0, "bad_calls": 3.0}
    assert not [one for one in descendants(os.getpid()) if "server.py" in one.command]


def test_an_episode_has_its_own_process_unless_it_is_shared(servers):
    turns = say("add", a=1), say("calls_so_far")
    own = play([McpEnv(servers), McpEnv(servers)], *turns)
    assert [read[-1] for read, _ in own] == [["1"], ["1"]]
    shared = play([McpEnv(servers, shared=True), McpEnv(servers, shared=True)], *turns)
    assert [read[-1] for read, _ in shared] == [["1"], ["2"]]


def test_a_server_that_does_not_start_is_a_user_error(servers):
    with pytest.raises(UserError, match="lists no tools"):
        McpEnv({"tests": {"command": "no-such-program"}})
    with pytest.raises(UserError, match="two tools have the same name"):
        McpEnv({"one": servers["tests"], "two": {**servers["tests"], "env": {"A": "b"}}})
