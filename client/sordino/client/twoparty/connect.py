"""``connect`` for profile ``two-party``: from the addresses of a server and a dealer to a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from safetensors.numpy import load_file

from sordino.client.bundle import BundleProgress, fetch_bundle
from sordino.client.model import build_model, load_tokenizer
from sordino.client.transport import Connection
from sordino.client.twoparty.model import use_shares
from sordino.client.twoparty.session import PartySession, Progress
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import FingerprintError, ProtocolError, RangeError
from sordino.shared.twoparty.source import Dealer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_AHEAD: Final = 4096


class TwoPartyConnected(NamedTuple):
    """``model, tokenizer, session = connect(...)``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    session: PartySession


def connect(
    target: str,
    *,
    dealer: str,
    dealer_token: str,
    dealer_ca: str | Path | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
    fingerprint: str | None = None,
    ahead: int = 64,
    cache: str | Path | None = None,
    timeout_s: float = 60,
    retry_s: float = 60,
    on_bundle: BundleProgress | None = None,
    on_plan: Callable[[str], object] | None = None,
    on_provision: Progress | None = None,
) -> TwoPartyConnected:
    """Connects to a hosted model so that neither side sees an activation.

    Args:
        target: ``grpcs://host:port``. token, ca: as the provider gave them.
        dealer: of the server's dealer, which somebody else runs. dealer_token, dealer_ca: as its operator gave them.
        fingerprint: refuse a server that holds any other split.
        ahead: rows for which encrypted products are made now; more are made when they run out. Larger numbers cost
            less a row (docs/two-party.md).
        cache: where client bundles are kept. timeout_s: longest wait for a message. retry_s: for the server, at first.
        on_bundle, on_provision: progress callbacks, the latter also when more is made in an answer. on_plan: told
            before how much that will be; the log, without.

    Returns:
        A ``transformers`` model in eval mode, its tokenizer, and the session to close when done. A session that breaks
        is over: shares of its cache are in two places.

    Raises:
        TransportError, AuthError: server or dealer cannot be reached, or refuse a token.
        FingerprintError: the server holds another split. BundleError: its files are damaged.
        ProtocolError: the server has no dealer. UnsupportedModelError: the model is of a kind that this profile lacks.
        RangeError: ``ahead`` is out of its range.
    """
    if not 0 <= ahead <= MOST_AHEAD:
        raise RangeError(f"ahead is 0 to {MOST_AHEAD} rows, not {ahead}")
    connection = Connection(target, token=token, ca=Path(ca) if ca else None, timeout_s=timeout_s, retry_s=retry_s)
    try:
        if fingerprint is not None and connection.manifest.fingerprint != fingerprint:
            raise FingerprintError(
                "the server holds another split than the fingerprint given: ask the provider which it is"
            )
        if pb.PROTOCOL_TWO_PARTY not in connection.protocols:
            raise ProtocolError("the server does not offer profile two-party: its provider must start it with a dealer")
        folder = fetch_bundle(connection, cache=Path(cache) if cache else None, progress=on_bundle)
        model = build_model(folder, connection.manifest, connection.timings)
        tokenizer = load_tokenizer(folder, model)
        tensors = load_file(folder / "client.safetensors")
        session = PartySession(
            connection,
            tensors,
            Dealer(dealer, Path(dealer_ca) if dealer_ca else None, dealer_token),
            on_plan=on_plan,
            on_provision=on_provision,
        )
    except BaseException:
        connection.close()
        raise
    try:
        use_shares(model, session)
        if ahead:
            session.provision(ahead)
    except BaseException:
        session.close()
        raise
    return TwoPartyConnected(model, tokenizer, session)
