"""The least that a broker needs of mitmproxy: one host allowed, one header replaced. For `mitmdump -s`.

Reads EXEAT_BENCH_HOST and EXEAT_BENCH_ADDRESS: names are not resolved, the upstream is on the loopback.
"""

import os

from mitmproxy import http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

HOST = os.environ["EXEAT_BENCH_HOST"]
ADDRESS = os.environ["EXEAT_BENCH_ADDRESS"]


def server_connect(data: ServerConnectionHookData) -> None:
    if data.server.address is not None and data.server.address[0] == HOST:
        data.server.address = (ADDRESS, data.server.address[1])


def requestheaders(flow: http.HTTPFlow) -> None:
    if flow.request.pretty_host != HOST:
        flow.response = http.Response.make(403, b"no\n")
        return
    if "placeholder" in flow.request.headers.get("x-api-key", ""):
        flow.request.headers["x-api-key"] = "the-real-secret"
