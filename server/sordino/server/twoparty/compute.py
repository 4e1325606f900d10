"""A ``Compute`` stream: messages in the loop, passes in a thread, which wait for each other."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.calls import Call
from sordino.server.twoparty.session import PartySession, StreamLink, TwoPartyModel
from sordino.shared.errors import ProtocolError
from sordino.shared.twoparty.dealt import Dealt
from sordino.shared.twoparty.source import Dealer

InThread: TypeAlias = Callable[..., Awaitable[Any]]


async def compute(model: TwoPartyModel, dealer: Dealer, requests: Call, call: Call, in_thread: InThread) -> None:
    """Serves one session, after its first message, until its client ends the stream.

    Raises:
        SordinoError: the session cannot be joined, or a request does not fit.
    """
    await call.write(pb.ComputeResponse(plan=pb.PartyPlan(plan=model.plan.to_json())))
    first = await requests.read()
    if first is None:
        return
    if first.WhichOneof("kind") != "session":
        raise ProtocolError("the second message of a stream names the session at the dealer")
    if not hmac.compare_digest(first.session.digest, model.public.digest()):
        raise ProtocolError("the client has other public numbers than this server: their shares would add up to noise")
    dealing = await in_thread(Dealt.joined, dealer, first.session.session, model.fingerprint, model.plan)
    try:
        session = PartySession(model, dealing, first.session.public_key)
        await call.write(pb.ComputeResponse(joined=True))
        await _serve(session, requests, call, in_thread)
    finally:
        await in_thread(dealing.close)


async def _serve(session: PartySession, requests: Call, call: Call, in_thread: InThread) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    outgoing: asyncio.Queue[pb.ComputeResponse] = asyncio.Queue()
    failures: list[BaseException] = []
    link: StreamLink | None = None
    running: asyncio.Future[None] | None = None

    def ended(job: asyncio.Future[None]) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            failures.append(error)
            if task is not None:
                task.cancel()

    async def write() -> None:
        while True:
            await call.write(await outgoing.get())

    writer = asyncio.ensure_future(write())
    writer.add_done_callback(ended)
    try:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "words":
                if link is None:
                    raise ProtocolError("words of no pass: a pass begins with its numbers")
                link.put(request.words)
            elif kind == "forward":
                if running is not None and not running.done():
                    raise ProtocolError("a pass begins when the one before has ended")
                link = StreamLink(loop, outgoing.put_nowait)
                running = asyncio.ensure_future(in_thread(session.forward, request.forward, link))
                running.add_done_callback(ended)
            elif kind == "products":
                answers = session.products(request.products)
                while (answer := await in_thread(next, answers, None)) is not None:
                    outgoing.put_nowait(pb.ComputeResponse(answers=answer))
            else:
                raise ProtocolError("a request of a session holds products, a pass or words, this one none of them")
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise
    finally:
        writer.cancel()
        if link is not None:
            link.put(None)
