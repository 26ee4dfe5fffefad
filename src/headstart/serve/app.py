"""The server's routes, limits and errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from time import time
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.serve.jobs import Closed, Job, Jobs
from headstart.serve.metrics import Metrics
from headstart.serve.options import ServeOptions
from headstart.serve.replies import Reply
from headstart.serve.requests import ChatRequest, CompletionRequest, Request, options_of, prompts_of
from headstart.streaming import Answer, Stream

MAX_BODY = 10_000_000
"""Longest body of a request, in bytes."""
_NAMES = {
    "--max-new-tokens": "max_tokens",
    "--min-new-tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "with raw=True (--raw)": "to /v1/completions",
}
"""Names in a request of things that the decoder's messages mention."""


class Refusal(HTTPException):
    """An error of a request, with its HTTP status and OpenAI's code."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message, {"Retry-After": "1"} if status == 429 else None)
        self.code, self.param = code, param


class _BoundedRequest(HttpRequest):
    """A request with a body of limited size and depth, without lone surrogates and NaN."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            body = bytearray()
            async for part in self.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise Refusal(413, f"The body is longer than {MAX_BODY} bytes. Shorten the prompt.")
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"The body is not valid JSON: {error}. Send a JSON object.") from error


class Service:
    """A decoder behind OpenAI's API.

    Attributes:
        jobs: running and queued requests.
    """

    def __init__(self, decoder: Decoder, options: ServeOptions) -> None:
        self.decoder, self.options = decoder, options
        self.model = options.model_name or decoder.target.name
        self.jobs = Jobs(options.max_requests, options.max_queue)
        self.metrics = Metrics(self.jobs)
        self.defaults = default_sampling(decoder)

    def check_draining(self) -> None:
        """Refuse requests while the server stops."""
        if self.jobs.draining:
            raise Refusal(503, "The server is stopping. Send the request to another one.", "draining")

    async def answer(self, body: Request, request: HttpRequest) -> Response:
        """Queue a request, and answer it whole or in chunks."""
        if body.model not in (None, self.model):
            problem = f"There is no model {body.model!r} here. Ask for {self.model!r}."
            raise Refusal(404, problem, "model_not_found", "model")
        prompts, streams = await asyncio.to_thread(self._streams, body)
        self.check_draining()
        if (job := self.jobs.start(streams)) is None:
            problem = f"The queue of {self.options.max_queue} is full. Send the request again later."
            raise Refusal(429, problem, "queue_full")
        job.tasks.append(asyncio.create_task(self._watch(request, job)))
        self.metrics.count(prompt_tokens=sum(map(len, prompts)))
        reply = Reply(body, self.model, self.decoder.target, prompts)
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return StreamingResponse(self._chunks(job, reply, with_usage), media_type="text/event-stream")
        try:
            async for _ in self._contents(job, reply):
                pass
        except Exception as error:
            return error_response(error)
        return JSONResponse(reply.whole())

    def _streams(self, body: Request) -> tuple[list[list[int]], list[Stream]]:
        """Tokenize and check a request; return its prompts and one stream a choice, which decodes nothing yet."""
        prompts, each = prompts_of(body, self.decoder), body.n or 1
        if (count := len(prompts) * each) > self.jobs.capacity:
            problem = f"The request has {count} choices, and the server takes {self.jobs.capacity}."
            raise Refusal(400, f"{problem} Lower n, or send fewer prompts.", param="n")
        streams = []
        for index in range(count):
            prompt = prompts[index // each]
            room = self.decoder.target.max_length - len(prompt)
            options = options_of(body, self.defaults, max(1, min(self.options.max_tokens, room)))
            options["drafter"] = self.options.drafter
            options["seed"] = None if body.seed is None else body.seed + index
            streams.append(self.decoder.stream(prompt, **options))
        return prompts, streams

    async def _watch(self, request: HttpRequest, job: Job) -> None:
        """Close a job when its client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.jobs.close(job)

    async def _contents(self, job: Job, reply: Reply) -> AsyncIterator[tuple[int, str]]:
        """Add the events of a job to its reply; yield choices and their new content, then end the job."""
        try:
            async for index, event in job:
                if isinstance(event, Answer):
                    self.metrics.count_answer(event, job.waited[index])
                yield index, reply.choices[index].push(event)
        finally:
            self.metrics.requests.labels(job.outcome).inc()
            self.jobs.close(job)

    async def _chunks(self, job: Job, reply: Reply, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error becomes the last one, since the status has been sent."""

        def event(body: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

        try:
            opened = False
            async for index, content in self._contents(job, reply):
                if not opened:  # now, since clients time the first chunk
                    opened = True
                    for number in range(len(reply.choices)):
                        yield event(reply.chunk(number))
                ended = reply.choices[index].answer is not None
                last = ended and all(choice.answer is not None for choice in reply.choices)
                timings = {"timings": reply.figures()["timings"]} if last and not with_usage else {}
                if content or ended:
                    yield event(reply.chunk(index, content, **timings))
            if with_usage:
                yield event(reply.chunk(None, **reply.figures()))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: " + bytes(error_response(error).body) + b"\n\n"


def default_sampling(decoder: Decoder) -> dict[str, float]:
    """Return the target's own sampling settings, with temperature 1 if it has none."""
    config = getattr(decoder.target.model, "generation_config", None)
    given = config.to_diff_dict() if config is not None else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {"temperature": 1.0} | {name: given[name] for name in names if given.get(name) is not None}


def error_response(error: Exception) -> Response:
    """Return an error in OpenAI's form; logs errors of the server."""
    status, code, param = 400, getattr(error, "code", None), getattr(error, "param", None)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, UserError):
        message = str(error)
        for word, name in _NAMES.items():
            message = message.replace(word, name)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        path = [str(part) for part in first["loc"][1:]]
        param = path[0] if path else None
        message = f"{param}: {first['msg']}." if path else "Send a JSON object, as application/json."
        if first["type"] == "extra_forbidden":
            message = f"This server has no field {'.'.join(path)}. Leave it out."
    elif isinstance(error, Closed):
        status, message = 503, "The server stopped before the answer was complete. Send the request again."
    else:
        status, message = 500, "The server failed. Its log has the error."
        logging.getLogger(__name__).error("A request failed.", exc_info=error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message[:1000], "type": kind, "code": code, "param": param}
    return JSONResponse({"error": body}, status, getattr(error, "headers", None))


def make_app(service: Service) -> FastAPI:
    """Make the ASGI application of a service."""

    class Checked(APIRoute):
        """A route that checks the key, bounds the body and counts refusals."""

        def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
            honest = super().get_route_handler()

            async def handle(request: HttpRequest) -> Response:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                try:
                    if key and not hmac.compare_digest(given.encode(), key.encode()):
                        problem = "The API key is wrong or missing. Send Authorization: Bearer KEY."
                        raise Refusal(401, problem, "invalid_api_key")
                    return await honest(_BoundedRequest(request.scope, request.receive))
                except Exception:
                    service.metrics.requests.labels("refused").inc()
                    raise

            return handle

    app = FastAPI(title="headstart", docs_url=None, redoc_url=None)
    router, created, key = APIRouter(prefix="/v1", route_class=Checked), int(time()), service.options.api_key

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: HttpRequest) -> Response:
        return await service.answer(body, request)

    @router.post("/completions")
    async def complete(body: CompletionRequest, request: HttpRequest) -> Response:
        return await service.answer(body, request)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        model = {"id": service.model, "object": "model", "created": created, "owned_by": "headstart"}
        return {"object": "list", "data": [{**model, "max_model_len": service.decoder.target.max_length}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        service.check_draining()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        return error_response(error)

    for kind in (UserError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.include_router(router)
    return app
