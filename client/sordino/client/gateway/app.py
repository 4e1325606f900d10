"""The endpoint's routes. What comes in is checked (:mod:`.schema`), gets a place (:mod:`.desk`) and becomes one call of
:class:`~sordino.client.answers.Generation`, whose pieces become OpenAI's objects (:mod:`.replies`)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sordino.client.answers import Answers, Generation, Piece
from sordino.client.gateway.desk import Desk, Job
from sordino.client.gateway.faults import ApiError, bad_request, fault_of
from sordino.client.gateway.prompts import Prompts
from sordino.client.gateway.replies import ChatReply, CompletionReply, Reply
from sordino.client.gateway.schema import ChatRequest, CompletionRequest, parse
from sordino.client.gateway.tools import Dialect, Reader, dialect_of, forced_schema
from sordino.client.guide import GuideSpec
from sordino.client.options import MAX_ANSWERS, Options
from sordino.shared.errors import IntegrityError, RangeError, SordinoError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sordino.client.session import Connected

MAX_BODY_BYTES: Final = 8 << 20
_BODY_S: Final = 30.0  # for a body to come: this machine's own programs send it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose at the start.

    Attributes:
        model: what clients call it. max_tokens: of an answer in a chat, where the request does not say.
        draft_model: for ``speculate`` of ``draft`` and ``mixed``.
    """

    model: str
    max_tokens: int = 1024
    parallel: int = 1
    queue: int = 16
    draft_model: PreTrainedModel | None = None


class Gateway:
    """What the routes share: the link, the places, and why the link has failed for good, if it has."""

    def __init__(self, link: Connected, settings: Settings) -> None:
        self.link, self.settings = link, settings
        self.desk = Desk(settings.parallel, settings.queue)
        self.prompts = Prompts(link)
        self.failure: str | None = None
        self._created = int(time.time())

    def models(self) -> list[dict[str, Any]]:
        limit = getattr(self.link.model.config, "max_position_embeddings", None)
        head = {"id": self.settings.model, "object": "model", "created": self._created, "owned_by": "sordino"}
        return [{**head, "max_model_len": limit}]

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await _body(request))
        self.check_model(asked.model)
        with _bad_requests():
            template = self.prompts.template
            choice, functions = asked.choice, [tool.function for tool in asked.tools or ()]
            dialect: Dialect | None = None
            guides: dict[str, GuideSpec] = {}
            if functions and choice.mode != "none":
                dialect = dialect_of(template)
                if choice.mode == "required":
                    offered = [function for function in functions if choice.name in (None, function.name)]
                    dialect, guides["tool_choice"] = (
                        "forced",
                        GuideSpec(kind="json_schema", value=forced_schema(offered)),
                    )
            options = asked.options(self.settings.max_tokens, guides)
            messages = [message.plain() for message in asked.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] if dialect else None
        reply = ChatReply(
            **self._of_reply(),
            logprobs=bool(asked.logprobs),
            reader=partial(self._reader, dialect, frozenset(function.name for function in functions))
            if dialect
            else None,
            most_calls=1 if asked.parallel_tool_calls is False else None,
        )
        return await self._respond(
            request,
            options,
            reply,
            lambda: [self.prompts.chat(messages, tools)],
            stream=bool(asked.stream),
            include_usage=asked.include_usage,
        )

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _body(request))
        self.check_model(asked.model)
        with _bad_requests():
            options = asked.options()
            if len(asked.prompt) * options.n > MAX_ANSWERS:
                raise RangeError(
                    f"{len(asked.prompt)} prompts with n={options.n}: at most {MAX_ANSWERS} answers at once"
                )
        return await self._respond(
            request,
            options,
            CompletionReply(**self._of_reply(), logprobs=asked.logprobs is not None),
            lambda: [self.prompts.plain(prompt) for prompt in asked.prompt],
            stream=bool(asked.stream),
            include_usage=asked.include_usage,
        )

    async def close(self, patience_s: float) -> None:
        """Ends all answers after the pass under way, and the session in any case."""
        ended = await self.desk.close(patience_s)
        await asyncio.to_thread(self.link.session.close)  # whoever waits for the server is told
        if not ended:
            await self.desk.close(patience_s)
        self.prompts.renderer.close()

    async def _respond(
        self,
        request: Request,
        options: Options,
        reply: Reply,
        prompts: Callable[[], list[list[int]]],
        *,
        stream: bool,
        include_usage: bool,
    ) -> Response:
        if self.failure is not None:
            raise ApiError(502, self.failure, code="integrity_check_failed")
        job = self.desk.submit(partial(self._work, options, prompts))
        events = aiter(job)
        try:
            async with _watching(request, job):
                # The status of HTTP is told with the first piece: what goes wrong before has one of its own.
                first = await anext(events)
                while not stream and not isinstance(first, _Done):
                    first = await anext(events)
        except Exception as error:
            raise fault_of(error) from None
        if not stream:
            return JSONResponse(reply.whole(first.answers, first.prompt_tokens))
        return _Stream(job, self._lines(first, events, reply, include_usage=include_usage))

    def _work(self, options: Options, prompts: Callable[[], list[list[int]]], job: Job) -> None:
        """The thread of one answer."""
        with _bad_requests():
            ids = prompts()
            inputs = self.prompts.inputs(ids)
            generation = Generation(
                self.link, inputs, options, draft_model=self.settings.draft_model, on_piece=job.emit
            )
        # An answer of constant length has it also where nobody listens any more.
        job.stop_with((lambda: None) if options.fixed_length else generation.cancel)
        try:
            answers = None if self._in_vain(job, options) else generation.run()
        except IntegrityError as error:  # the session is over, whether or not anybody waits to be told
            self.failure = f"{error}; nothing more is sent to this server: start the gateway anew if you trust it still"
            raise
        if answers is None or self._in_vain(job, options):
            raise ApiError(503, "the gateway is closing, or the client has left", code="closing")
        job.emit(_Done(answers, sum(len(one) for one in ids)))

    @staticmethod
    def _in_vain(job: Job, options: Options) -> bool:
        return job.left and not options.fixed_length

    async def _lines(
        self, first: Piece | _Done, events: AsyncIterator[Any], reply: Reply, *, include_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events; one that is an error ends them."""
        empty = {"usage": None} if include_usage else {}
        try:
            event = first
            while not isinstance(event, _Done):
                if event.finish != "cancelled" and (chunk := reply.chunk(event)) is not None:
                    yield _line({**chunk, **empty})
                event = await anext(events)
            if include_usage:
                yield _line(reply.last_chunk(event.answers, event.prompt_tokens))
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _line(fault_of(error).body)

    def _of_reply(self) -> dict[str, Any]:
        tokenizer = self.link.tokenizer

        def spell(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        fingerprint = self.link.session.manifest.fingerprint
        return {"model": self.settings.model, "fingerprint": fingerprint, "spell": spell}

    def _reader(self, dialect: Dialect, names: frozenset[str]) -> Reader:
        mark = self.link.tokenizer.get_vocab().get("[TOOL_CALLS]") if dialect == "mistral" else None
        return Reader(dialect, names, mark if mark in self.link.tokenizer.all_special_ids else None)

    def check_model(self, name: str) -> None:
        if name != self.settings.model:
            text = f"there is one model here, {self.settings.model}: ask for it, or start the gateway with --name"
            raise ApiError(404, text, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class _Done:
    answers: Answers
    prompt_tokens: int


class _Stream(StreamingResponse):
    """Leaves the job however the response ends."""

    def __init__(self, job: Job, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.leave()


def create_app(link: Connected, settings: Settings) -> tuple[FastAPI, Gateway]:
    """The routes, without the guard that has to stand before them."""
    gateway = Gateway(link, settings)
    # Nothing of FastAPI's own: pages that load scripts from elsewhere, and telemetry, which is told of bodies.
    silent = TelemetryConfig(tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False)
    app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry=silent)
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.completions, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": gateway.models()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model(name)
        return gateway.models()[0]

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        if gateway.failure is not None:
            return JSONResponse({"status": "failed", "reason": gateway.failure}, 503)
        return JSONResponse({"status": "ok"})

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        del request
        text = {404: "there is no such route", 405: "this route takes other methods"}.get(
            error.status_code, error.detail
        )
        return _error(ApiError(error.status_code, text, code="not_found" if error.status_code == 404 else None))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        return _error(ApiError(400, f"{where} has a value that means nothing here", code="invalid_value"))

    @app.exception_handler(SordinoError)
    async def refused(request: Request, error: SordinoError) -> JSONResponse:
        del request
        return _error(bad_request(error) if isinstance(error, RangeError) else fault_of(error))

    return app, gateway


def _error(fault: ApiError) -> JSONResponse:
    return JSONResponse(fault.body, fault.status, fault.headers)


def _line(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n"


@contextmanager
def _bad_requests() -> Iterator[None]:
    """While a request is understood, and nothing was sent, a value out of range is its own."""
    try:
        yield
    except RangeError as error:
        raise bad_request(error) from None


@asynccontextmanager
async def _watching(request: Request, job: Job) -> AsyncIterator[None]:
    """Leaves the job when the client goes, or what happens inside fails or is cancelled."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.leave()

    watching = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        job.leave()
        raise
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: it is larger than any prompt, or does not come.
    """
    too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_S:g} s", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ends early") from None
    return bytes(body)
