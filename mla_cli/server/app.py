"""The routes of the server: requests checked, handed to the worker, and answered whole or as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.server.answers import Shapes
from mla_cli.server.body import read_body
from mla_cli.server.errors import ApiError
from mla_cli.server.fields import read_object
from mla_cli.server.job import Job
from mla_cli.server.limits import Limits
from mla_cli.server.parameters import Call, parse_call
from mla_cli.server.prepare import Prepared, prepare
from mla_cli.server.reading import Answer, until_gone
from mla_cli.server.stream import EventStream
from mla_cli.server.worker import Worker

Handler = Callable[[HttpRequest], Awaitable[Response]]


@dataclass(frozen=True)
class Service:
    """What the routes share.

    Attributes:
        model: the name that is served. defaults: what a request does not say.
        readers: threads that read requests: JSON, templates and tokens of a long prompt would hold up all streams.
        metrics: what `/metrics` answers, and its content type; None: nothing.
    """

    worker: Worker
    model: str
    defaults: SamplingParams
    limits: Limits
    readers: ThreadPoolExecutor
    metrics: Callable[[], tuple[bytes, str]] | None


def create_app(service: Service) -> Starlette:
    """The application, without the checks of `guard`."""
    open_requests = 0
    since = int(time.time())
    of_token = service.worker.generator.tokenizer.token_bytes()

    def answering(kind: str) -> Handler:
        async def handle(request: HttpRequest) -> Response:
            nonlocal open_requests
            # Before its body is read: what is refused must cost no memory.
            service.worker.check_room()
            if open_requests >= service.limits.queue + service.worker.generator.max_batch:
                raise ApiError(429, "too many requests are open: try again later", headers={"retry-after": "1"})
            open_requests += 1
            try:
                call, job = await _accept(service, kind, request)
            finally:
                open_requests -= 1
            shapes = Shapes(
                kind, job.name, service.model, choices=len(job.sequences), logprobs=call.logprobs is not None,
                usage=call.usage, token_bytes=of_token,
            )  # fmt: skip
            answer = Answer(job, service.worker, service.limits)
            return EventStream(answer, shapes, service.limits) if call.stream else await _whole(request, answer, shapes)

        return handle

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, since)]})

    async def model(request: HttpRequest) -> Response:
        if request.path_params["name"] != service.model:
            raise ApiError(404, "there is no such model here", param="model", code="model_not_found")
        return JSONResponse(_model(service, since))

    async def health(request: HttpRequest) -> Response:
        broken = service.worker.broken
        return JSONResponse({"status": "broken" if broken else "ok"}, 503 if broken else 200)

    async def metrics(request: HttpRequest) -> Response:
        if service.metrics is None:
            raise HTTPException(404)
        content, kind = await asyncio.get_running_loop().run_in_executor(service.readers, service.metrics)
        return Response(content, media_type=kind)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", answering("chat"), methods=["POST"]),
            Route("/v1/completions", answering("completions"), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_route, Exception: _leave_to_guard},
    )
    app.router.redirect_slashes = False  # it would answer with the host that the client has named
    return app


def _model(service: Service, since: int) -> dict[str, Any]:
    context = service.worker.generator.context
    return {"id": service.model, "object": "model", "created": since, "owned_by": "mla", "max_model_len": context}


async def _accept(service: Service, kind: str, request: HttpRequest) -> tuple[Call, Job]:
    """The request as a job that the worker has."""
    loop = asyncio.get_running_loop()
    started, clock = loop.time(), time.perf_counter()
    body = await read_body(request, service.limits)

    def read() -> tuple[Call, Prepared]:
        most = min(service.limits.answers, service.worker.most)
        call = parse_call(kind, read_object(body), service.defaults, service.model, most)
        return call, prepare(call, service.worker.generator, service.worker.number, clock)

    call, prepared = await loop.run_in_executor(service.readers, read)
    job = Job(
        token_hex(12), prepared.sequences, prompt_tokens=prepared.prompt_tokens, started=started,
        pending=service.limits.pending,
    )  # fmt: skip
    service.worker.submit(job)
    return call, job


async def _whole(request: HttpRequest, answer: Answer, shapes: Shapes) -> Response:
    """The answer in one piece; nothing for a client that has gone meanwhile."""
    collecting = asyncio.ensure_future(answer.collect())
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)
        return JSONResponse(shapes.whole(collecting.result(), answer.job.prompt_tokens), headers=answer.headers)
    finally:
        answer.cancel()
        collecting.cancel()
        leaving.cancel()


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _leave_to_guard(request: HttpRequest, error: Exception) -> Response:
    raise error


async def _refuse_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method[:20], request.url.path[:100]
    what = f"there is no {path}" if error.status_code == 404 else f"{method} is not for {path}"
    return JSONResponse(ApiError(error.status_code, what).body(), error.status_code, dict(error.headers or {}))
