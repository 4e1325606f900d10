"""A ``Compute`` stream: messages in the loop, passes in a thread, which wait for each other."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.calls import Call
from sordino.server.twoparty.session import PartySession, StreamLink, TwoPartyModel
from sordino.shared.errors import AuthError, LimitError, ProtocolError, SessionLostError, TransportError
from sordino.shared.twoparty.dealt import Dealt
from sordino.shared.twoparty.source import Dealer, PassSource

log = logging.getLogger(__name__)
InThread: TypeAlias = Callable[..., Awaitable[Any]]

# Answers that have not gone out. Parties of a pass are never more than two messages apart.
_UNREAD: Final = 8


async def compute(
    model: TwoPartyModel, dealer: Dealer, requests: Call, call: Call, in_thread: InThread, silence_s: float
) -> None:
    """Serves one session, after its first message, until its client ends the stream. A session whose stream ends, for
    whatever reason, is over.

    Args:
        silence_s: for which a client may send nothing in the middle of a pass.

    Raises:
        SordinoError: the session cannot be joined, or a request does not fit.
    """
    await call.write(pb.ComputeResponse(plan=pb.PartyPlan(plan=model.plan.to_json(), opened=model.opened)))
    first = await requests.read()
    if first is None:
        return
    if first.WhichOneof("kind") != "session":
        raise ProtocolError("the second message of a stream names the session at the dealer")
    if not hmac.compare_digest(first.session.digest, model.digest):
        raise ProtocolError("the client has other public numbers than this server: their shares would add up to noise")
    joined: list[Dealt] = []  # also by a thread whose call has ended meanwhile
    passes: list[asyncio.Future[None]] = []

    def join() -> None:
        try:
            joined.append(Dealt.joined(dealer, first.session.session, model.fingerprint, model.plan))
        except SessionLostError:
            raise
        except (TransportError, AuthError) as error:
            log.error("no session of profile two-party: %s", error)
            raise TransportError("this server cannot use its dealer: tell its provider, whose log says why") from None

    async def leave() -> None:
        for dealing in joined:
            await in_thread(dealing.close)  # wakes a pass that waits for it
        if passes:
            await asyncio.wait(passes)

    try:
        await in_thread(join)
        session = PartySession(model, joined[0], first.session.public_key)
        await call.write(pb.ComputeResponse(joined=True))
        await _serve(session, requests, call, in_thread, passes, silence_s)
    except SessionLostError as error:  # which to a client would mean its own with this server
        raise TransportError(f"of the session at the dealer: {error}") from None
    finally:
        # Also where this is cancelled once more: gRPC does so for a client that is gone.
        await asyncio.shield(asyncio.ensure_future(leave()))


async def _serve(
    session: PartySession,
    requests: Call,
    call: Call,
    in_thread: InThread,
    passes: list[asyncio.Future[None]],
    silence_s: float,
) -> None:
    """``passes`` holds the one that is under way, if there is one."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    outgoing: asyncio.Queue[pb.ComputeResponse] = asyncio.Queue(_UNREAD)
    failures: list[BaseException] = []
    link: StreamLink | None = None
    serving = True

    def fail(error: BaseException) -> None:
        failures.append(error)
        if task is not None:
            task.cancel()

    def ended(job: asyncio.Future[None]) -> None:
        # What comes after the stream's end has another cause, which is told.
        if not job.cancelled() and (error := job.exception()) is not None and serving:
            fail(error)

    def send(words: bytes) -> None:
        try:
            outgoing.put_nowait(pb.ComputeResponse(words=words))
        except asyncio.QueueFull:
            fail(LimitError(f"the client has left {_UNREAD} answers unread"))

    async def write() -> None:
        while True:
            await call.write(await outgoing.get())

    async def forward(wanted: pb.Forward, source: PassSource, link: StreamLink) -> None:
        share = await in_thread(session.forward, wanted, source, link)
        passes.clear()  # before the client can know, who asks for the next one then
        send(share)

    writer = asyncio.ensure_future(write())
    writer.add_done_callback(ended)
    try:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "words":
                if link is None or not passes:
                    raise ProtocolError("words of no pass: a pass begins with its numbers")
                link.put(request.words)
            elif kind == "ahead":
                session.ask_ahead(request.ahead)
            elif kind not in ("forward", "products"):
                raise ProtocolError("a request of a session holds products, a pass or words, this one none of them")
            elif passes:
                raise ProtocolError("a pass begins, or products are made, when the pass before has ended")
            elif kind == "forward":
                link = StreamLink(loop, send, silence_s)
                passes.append(asyncio.ensure_future(forward(request.forward, session.begin(request.forward), link)))
                passes[0].add_done_callback(ended)
            else:
                answers = session.products(request.products)
                while (answer := await in_thread(next, answers, None)) is not None:
                    await outgoing.put(pb.ComputeResponse(answers=answer))
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise
    finally:
        serving = False
        writer.cancel()
        if link is not None:
            link.put(None)
