"""A real MCP server (the `mcp` package) as an origin with TLS, in a process of its own, and a client program for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.support.authority import Authority

SERVER = '''
import json, os, ssl, sys
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

server = MCPServer("tracker")

@server.tool()
def get_issue(number: int) -> str:
    """Read one issue."""
    return f"issue {number}"

@server.tool()
def get_comments(number: int) -> str:
    """Read its comments."""
    return f"comments of {number}"

@server.tool()
def delete_issue(number: int) -> str:
    """Delete one issue."""
    return f"deleted {number}"

security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
app = server.streamable_http_app(json_response=sys.argv[4] == "json", transport_security=security)

async def witness(scope, receive, send):
    if scope["type"] == "http":
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        with open(sys.argv[3], "a") as log:
            log.write(json.dumps({"method": scope["method"], "headers": headers}) + "\\n")
    await app(scope, receive, send)

pem = sys.argv[2]
config = uvicorn.Config(witness, fd=int(sys.argv[1]), ssl_certfile=pem, ssl_keyfile=pem, log_level="error")
uvicorn.Server(config).run()
'''

CLIENT = """
import asyncio, json, sys
import mcp
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

async def main():
    url, mode, headers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    told = {}
    http = create_mcp_http_client(headers=headers)
    async with http, Client(streamable_http_client(url, http_client=http), mode=mode) as client:
        told["tools"] = [tool.name for tool in (await client.list_tools()).tools]
        for name in sys.argv[4:]:
            try:
                result = await client.call_tool(name, {"number": 7})
                told[name] = {"text": result.content[0].text, "error": result.is_error}
            except mcp.MCPError as error:
                told[name] = {"refused": error.error.message, "code": error.error.code, "data": error.error.data}
    print(json.dumps(told))

asyncio.run(main())
"""


class McpServer:
    """The server as an origin for `destinations:`. A context manager.

    `answers`: "json" for one message, "events" for a stream.
    """

    tls = True

    def __init__(self, name: str, *, address: str, answers: str, authority: Authority | None = None) -> None:
        self.names = (name,)
        self.address = address
        self.answers = answers
        self.authority = authority or Authority()
        self.entries: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._witness = Path(self._folder.name) / "requests"
        self._listener = socket.create_server((address, 0))
        self.port = int(self._listener.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://{self.names[0]}:{self.port}/mcp"

    @property
    def requests(self) -> list[str]:
        """What came, one JSON text each."""
        return self._witness.read_text().splitlines() if self._witness.exists() else []

    def __enter__(self) -> McpServer:
        pem = Path(self._folder.name) / "server.pem"
        pem.write_bytes(self.authority.issue((*self.names, self.address)))
        number = self._listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(number), str(pem), str(self._witness), self.answers],
            pass_fds=[number],
            env={"PATH": os.environ.get("PATH", ""), "HOME": self._folder.name},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()
