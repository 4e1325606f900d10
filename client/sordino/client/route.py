"""Which of several servers of one model is asked: replicas hold the same groups, stages of a pipeline different ones.

A session asks the same replica as long as that answers. One that failed is asked for products again only after it has
said anew what it holds: it may have been started with another model meanwhile, or as another stage.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from sordino.client.interrupts import interrupts
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.shared.errors import (
    FingerprintError,
    HandshakeError,
    LimitError,
    ProtocolError,
    SessionLostError,
    SordinoError,
    TransportError,
    UnknownGroupError,
)
from sordino.shared.manifest import ModelManifest
from sordino.shared.transport import DEFAULT_MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES, error_of

log = logging.getLogger(__name__)

# What another server of the same groups may do better. Never a failed check, nor a token that is refused.
PASSING: Final = (TransportError, LimitError, FingerprintError, UnknownGroupError)

_STRAGGLER_S: Final = 2.0  # for a server that says nothing at the start, once the others suffice
_ASK_AGAIN_S: Final = 1.0
_ASK_TIMEOUT_S: Final = 5.0


class MovedError(TransportError):
    """A server failed, and another one that holds the same has not: no reason to wait before the next attempt."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server says of itself; ``groups`` are those that it evaluates, of the manifest's."""

    manifest: ModelManifest
    groups: range
    max_message_bytes: int
    protocols: tuple[int, ...]
    version: str

    @classmethod
    def of(cls, reply: pb.GetManifestResponse) -> Offer:
        """Raises BundleError for a manifest that is malformed, ProtocolError for figures that mean nothing."""
        manifest = ModelManifest.from_json(reply.manifest)
        every = range(len(manifest.groups))
        groups = range(reply.first_group, reply.first_group + reply.group_count) if reply.group_count else every
        if groups.stop > every.stop:
            raise ProtocolError(f"the server says it holds groups up to {groups.stop - 1}: the model has {every.stop}")
        most = reply.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        if most < MIN_MESSAGE_BYTES:
            raise ProtocolError(f"the server takes messages of {most} bytes, at least {MIN_MESSAGE_BYTES} are needed")
        return cls(manifest, groups, most, tuple(reply.protocols), reply.version)


class Target:
    """One server: its channel, and how it fares.

    Attributes:
        name: as the user gave it.
        offer: what it said last; None before it was reached, and where it does not fit the session.
        well: it is asked. error: why not.
        failures: calls that it broke off, refused or left without an answer.
    """

    def __init__(self, name: str, channel: grpc.Channel) -> None:
        self.name = name
        self.channel = channel
        self.stub = pb_grpc.SordinoStub(channel)
        self.offer: Offer | None = None
        self.well = False
        self.error: SordinoError | None = None
        self.failures = 0
        self.asking = False
        self.ask_after = 0.0

    def holds(self, group: int | None) -> bool:
        return self.offer is not None and (group is None or group in self.offer.groups)


@dataclass(frozen=True, slots=True)
class TargetState:
    """How one server of a session fares.

    Attributes:
        name: as it was given to ``connect``.
        first_group, group_count: what it holds; a count of 0 where it has not been reached.
        in_use: the requests of one of these groups go to it now.
        failures: calls that it broke off, refused or left without an answer.
        problem: why it is not asked now, or None.
    """

    name: str
    first_group: int
    group_count: int
    in_use: bool
    failures: int
    problem: str | None


class Route:
    """The servers of one session, in the order in which it prefers them. Safe for several threads.

    Args:
        targets: one or more. Of several the order is drawn anew by each session, so that they share the work.
        metadata: of each call. timeout_s: for what they say at the start.
    """

    def __init__(self, targets: Sequence[Target], metadata: tuple[tuple[str, str], ...], timeout_s: float) -> None:
        self.lone = targets[0] if len(targets) == 1 else None
        self.others = len(targets) - 1
        self._targets = tuple(targets)
        self._order = list(targets)
        secrets.SystemRandom().shuffle(self._order)
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards what follows, and the targets
        self._common: Offer | None = None
        self._closed = False
        self._answerer = threading.local()

    def open(self) -> Offer:
        """Asks all servers what they hold: what they have in common, of all groups.

        Those that cannot be reached are left out when the others hold every group, and asked again later.

        Raises:
            FingerprintError: two of them hold different models.
            HandshakeError: all were reached, and some groups nobody holds.
            TransportError: some could not be reached that are needed.
            AuthError: one refuses the token.
        """
        with self._changed:
            for target in self._targets:
                if target.offer is None and not target.asking:
                    self._ask(target, self._timeout_s, wait=False)
            start = time.monotonic()
            while any(target.asking for target in self._targets) and not self._closed:
                if time.monotonic() > start + _STRAGGLER_S and not self._missing():
                    break
                interrupts.check()
                self._changed.wait(0.1)
            if self._closed:
                raise SessionLostError("the session is closed")
            self._common = self._agreed()
            for target in self._targets:
                target.well = target.offer is not None
                if not target.well:
                    log.warning("%s is left out until it answers: %s", target.name, target.error or "no answer yet")
            return self._common

    def holder(self, group: int | None = None) -> Target:
        """The server to ask for a group, or for what each of them has.

        Raises:
            TransportError: none that holds it answers.
        """
        if self.lone is not None:
            return self.lone
        with self._changed:
            self._ask_again()
            found = self._preferred(group)
        if found is None:
            raise TransportError(self._nobody(group))
        return found

    def failed(self, target: Target, error: SordinoError, group: int | None = None) -> SordinoError:
        """Passes a server over after ``error``, one of :data:`PASSING`.

        Returns:
            What to raise: ``error``, or MovedError where another one that holds the group is to be asked.
        """
        interrupts.check()  # one that was noted has cancelled the call, which is no failure
        with self._changed:
            if self._closed or isinstance(error, SessionLostError):
                return error
            target.failures += 1
            if self.lone is not None:
                return error
            news, target.well, target.error = target.well, False, error
            self._order.remove(target)
            self._order.append(target)
            self._ask_again()
            other = self._preferred(group)
        if other is None:
            return error
        if news:
            log.warning("%s failed, %s is asked: %s", target.name, other.name, error)
        return MovedError(f"{target.name}: {error}")

    def answered(self, target: Target) -> None:
        """Notes whose answer this thread has, for :meth:`answerer`."""
        self._answerer.target = target

    def answerer(self) -> str:
        """Who sent the last answer to this thread, for the text of an error: with one server, there is but one."""
        last: Target | None = getattr(self._answerer, "target", None)
        return "the server" if self.lone or last is None else f"the server {last.name}"

    def wait(self, timeout_s: float) -> None:
        """Waits until a server that was away has said what it holds, or does not fit."""
        with self._changed:
            self._ask_again()
            self._changed.wait(timeout_s)

    def states(self) -> list[TargetState]:
        """How each fares, in the order in which they were given."""
        with self._changed:
            every = range(len(self._common.manifest.groups)) if self._common else range(0)
            used = {target for group in every if (target := self._preferred(group))}
            return [
                TargetState(
                    name=target.name,
                    first_group=target.offer.groups.start if target.offer else 0,
                    group_count=len(target.offer.groups) if target.offer else 0,
                    in_use=target in used,
                    failures=target.failures,
                    problem=None if target.well else str(target.error or "no answer yet"),
                )
                for target in self._targets
            ]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for target in self._targets:
            target.channel.close()

    # -- all of these with the lock held -------------------------------------------------------------------------------

    def _preferred(self, group: int | None) -> Target | None:
        return next((target for target in self._order if target.well and target.holds(group)), None)

    def _ask_again(self) -> None:
        now = time.monotonic()
        for target in self._targets:
            if not (target.well or target.asking or self._closed) and now >= target.ask_after:
                self._ask(target, _ASK_TIMEOUT_S, wait=True)

    def _ask(self, target: Target, timeout_s: float, *, wait: bool) -> None:
        target.asking = True
        target.ask_after = time.monotonic() + _ASK_AGAIN_S
        call = target.stub.GetManifest.future(
            pb.GetManifestRequest(), metadata=self._metadata, timeout=timeout_s, wait_for_ready=wait
        )
        call.add_done_callback(lambda ended: self._heard(target, ended))

    def _heard(self, target: Target, call: grpc.Future[pb.GetManifestResponse]) -> None:
        """What a server said of itself, or that it said nothing; in a thread of gRPC."""
        offer: Offer | None = None
        error: SordinoError | None = None
        try:
            offer = Offer.of(call.result())
        except grpc.RpcError as ended:
            error = error_of(ended)
        except grpc.FutureCancelledError:
            error = SessionLostError("the session is closed")
        except SordinoError as wrong:
            error = wrong
        with self._changed:
            target.asking = False
            if offer and self._common:
                error = _unfit(offer, self._common)
            news = str(error) != str(target.error)
            target.error = error
            target.offer = None if error else offer
            if self._common and not self._closed:
                target.well = target.offer is not None
                if target.well:
                    log.info("%s answers again", target.name)
                elif news and not isinstance(error, TransportError):
                    log.warning("%s is left out: %s", target.name, error)
            self._changed.notify_all()

    def _agreed(self) -> Offer:
        heard = [(target, target.offer) for target in self._targets if target.offer]
        silent = [target for target in self._targets if not target.offer]
        for target in silent:
            if target.error and (self.lone or not isinstance(target.error, PASSING)):
                raise target.error if self.lone else type(target.error)(f"{target.name}: {target.error}")
        if not heard:
            refused = all(isinstance(target.error, HandshakeError) for target in silent)
            raise (HandshakeError if refused else TransportError)("; ".join(map(_reason, silent)))
        one, offer = heard[0]
        for target, other in heard[1:]:
            if other.manifest.fingerprint != offer.manifest.fingerprint:
                raise FingerprintError(
                    f"{one.name} and {target.name} hold different models ({offer.manifest.fingerprint} and "
                    f"{other.manifest.fingerprint}): name servers of one model"
                )
        if missing := self._missing():
            names = [group.name for group in offer.manifest.groups]
            text = f"no server holds {_spans(missing, names)}; asked were " + ", ".join(t.name for t in self._targets)
            if silent:
                raise TransportError(f"{text}; not reached: " + "; ".join(map(_reason, silent)))
            raise HandshakeError(f"{text}: name servers that hold every layer between them")
        return Offer(
            manifest=offer.manifest,
            groups=range(len(offer.manifest.groups)),
            max_message_bytes=min(other.max_message_bytes for _, other in heard),
            protocols=tuple(p for p in offer.protocols if all(p in other.protocols for _, other in heard)),
            version=offer.version,
        )

    def _missing(self) -> list[int]:
        """Groups that no server holds, of those that have answered; without an answer, the first."""
        offers = [target.offer for target in self._targets if target.offer]
        every = range(len(offers[0].manifest.groups)) if offers else range(1)
        return [group for group in every if not any(group in offer.groups for offer in offers)]

    def _nobody(self, group: int | None) -> str:
        what = "the model" if group is None or self._common is None else self._common.manifest.groups[group].name
        away = [target for target in self._targets if not target.well]
        return f"no server that holds {what} answers: " + "; ".join(map(_reason, away))


def _unfit(offer: Offer, session: Offer) -> SordinoError | None:
    """Why a server that comes later cannot serve the session; None if it can."""
    if offer.manifest.fingerprint != session.manifest.fingerprint:
        return FingerprintError(f"it holds another model ({offer.manifest.fingerprint}) than the session's")
    if offer.max_message_bytes < session.max_message_bytes:
        return LimitError(f"it takes messages of {offer.max_message_bytes} bytes, smaller than those of the session")
    if not set(session.protocols) <= set(offer.protocols):
        return ProtocolError("it does not offer the protocols that the others do")
    return None


def _reason(target: Target) -> str:
    return f"{target.name} ({target.error or 'no answer yet'})"


def _spans(groups: Sequence[int], names: Sequence[str]) -> str:
    """``groups 4 to 7 (layers.1.q to layers.1.down)``, for each run of neighbours."""
    return ", ".join(
        f"groups {first} to {last} ({names[first]} to {names[last]})"
        if last > first
        else f"group {first} ({names[first]})"
        for first, last in _runs(groups)
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
