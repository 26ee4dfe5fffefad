"""A local HTTP server with replies from a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """A text or JSON page, truncated by `cut` bytes."""

    status: int
    page: Any
    headers: Mapping[str, str] = {}
    cut: int = 0


@contextmanager
def http_server(reply: Callable[[str, Mapping[str, str], Any], Reply | None]) -> Iterator[str]:
    """Yield the server's URL; `reply` maps path, headers and JSON body (None of a GET) to a reply, None to hang up."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: Any) -> None:
            found = reply(self.path, dict(self.headers), body)
            if found is not None:
                text = (found.page if isinstance(found.page, str) else json.dumps(found.page)).encode()
                self.send_response(found.status)
                for name, value in {**found.headers, "Content-Length": str(len(text))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text[: len(text) - found.cut])
            self.close_connection |= found is None or found.cut > 0

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
