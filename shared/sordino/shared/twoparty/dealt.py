"""One party's session at the dealer: its name, the party's key, and passes as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.proto.v1 import dealer_pb2 as pb
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.source import Dealer, DealerStream, PassSource
from sordino.shared.twoparty.tape import CLIENT, SERVER


@dataclass(frozen=True, slots=True)
class Dealt:
    """``key`` is 32 bytes, for nobody else."""

    session: bytes
    key: bytes
    stream: DealerStream

    @classmethod
    def begun(cls, dealer: Dealer, fingerprint: str, plan: Plan, silence_s: float) -> Dealt:
        """By a client; ``silence_s`` is of :class:`DealerStream`.

        Raises:
            SordinoError: the dealer refuses, or cannot be reached.
        """
        session, key = dealer.begin(fingerprint, plan)
        return cls(session, key, dealer.stream(session, CLIENT, silence_s=silence_s))

    @classmethod
    def joined(cls, dealer: Dealer, session: bytes, fingerprint: str, plan: Plan) -> Dealt:
        """By the server of a client that has begun it. Raises as :meth:`begun`."""
        key = dealer.join(session, fingerprint, plan)
        return cls(session, key, dealer.stream(session, SERVER))

    def ask(self, wanted: pb.Pass) -> PassSource:
        return self.stream.ask(wanted)

    def close(self) -> None:
        self.stream.close()
