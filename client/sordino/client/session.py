"""``sordino.connect``: from an address to a transformers model and its tokenizer."""

from __future__ import annotations

import logging
import math
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from platformdirs import user_data_path

from sordino.client.attend import EncryptedAttention
from sordino.client.blocks import prices
from sordino.client.bundle import BundleProgress, fetch_bundle
from sordino.client.interrupts import interrupts
from sordino.client.justintime import JustInTime
from sordino.client.kvcache import IMPLEMENTATION, use_encrypted_cache
from sordino.client.model import attach, build_model, check_device, load_tokenizer
from sordino.client.pool import CHUNK, MaskPool
from sordino.client.protocols import ClearProtocol, LinearProtocol, MaskedProtocol, RlweProtocol
from sordino.client.provision import Progress, ProvisionPlan, fetch_check_vectors, plan_batch
from sordino.client.refill import AutoKeeper, Keeper, Notify, PoolKeeper
from sordino.client.route import TargetState
from sordino.client.timings import Timings
from sordino.client.transport import Connection, Traffic
from sordino.client.watch import Watch
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import (
    BundleError,
    FingerprintError,
    PoolError,
    PoolSealedError,
    ProtocolError,
    RangeError,
    SordinoError,
)
from sordino.shared.manifest import ModelManifest
from sordino.shared.rlwe import PARAMS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
ProtocolName = Literal["masked", "auto", "rlwe", "clear"]
_ON_THE_WIRE: Final = {
    "masked": {pb.PROTOCOL_MASKED},
    "auto": {pb.PROTOCOL_MASKED, pb.PROTOCOL_RLWE},
    "rlwe": {pb.PROTOCOL_RLWE},
    "clear": {pb.PROTOCOL_CLEAR},
}
AttentionName = Literal["local", "rlwe"]
DEFAULT_BATCH = 2048


class Session:
    """What lies behind a connected model: traffic, masks, and the way to close it. A context manager."""

    def __init__(
        self,
        connection: Connection,
        protocol: LinearProtocol,
        keeper: PoolKeeper | AutoKeeper | None,
        attention: EncryptedAttention | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._connection = connection
        self._keeper = keeper
        self._owner = connection.owner
        self.protocol = protocol
        self.attention = attention
        self.watch = watch or Watch()

    @property
    def manifest(self) -> ModelManifest:
        return self._connection.manifest

    @property
    def traffic(self) -> Traffic:
        return self._connection.traffic

    @property
    def timings(self) -> Timings:
        return self._connection.timings

    def targets(self) -> list[TargetState]:
        """The servers of this session, in the order in which they were given: what each holds, and how it fares."""
        self._owner.check()
        with interrupts:
            return self._connection.route.states()

    @property
    def masks_left(self) -> int | None:
        """Slots (one for a row through the whole model) that can still be used; None without masks."""
        return self._keeper.pool.slots_left if self._keeper else None

    def provision(self) -> None:
        """Makes one batch of masks now instead of when they run out."""
        self._owner.check()
        if self._keeper:
            self._keeper.fill_now()

    def close(self) -> None:
        """Ends everything under way, in whichever thread it is: nobody is waited for who waits for the server.

        In a forked child it does nothing: what is under way is the parent's.
        """
        if not self._owner.here():
            return
        if self._keeper:
            self._keeper.close()
        if self.attention:
            self.attention.close()
        self._connection.close()
        self.protocol.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Connected(NamedTuple):
    """``model, tokenizer, session = sordino.connect(...)``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    session: Session


def connect(
    target: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    fingerprint: str | None = None,
    protocol: ProtocolName = "masked",
    attention: AttentionName = "local",
    page_tokens: int | None = None,
    bandwidth_mbit: float = 1000,
    pool: str | Path | None = None,
    passphrase: str | None = None,
    batch: int = DEFAULT_BATCH,
    low_water: int | None = None,
    refill: bool = True,
    provision: bool = True,
    check_vectors: Literal[0, 1, 2] | None = None,
    cache: str | Path | None = None,
    state_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    timeout_s: float = 60,
    retry_s: float = 60,
    on_bundle: BundleProgress | None = None,
    on_plan: Notify | None = None,
    on_provision: Progress | None = None,
    on_notice: Notify | None = None,
) -> Connected:
    """Connects to a hosted model; the prompt and the answer stay on this side.

    Args:
        target: ``grpcs://host:port``, or ``grpc://localhost:port`` for a server without TLS on this machine. Several
            with commas between them are replicas or stages of one model (docs/replicas.md).
        token: as the provider gave it. ca: PEM of the authority behind the server's certificate.
        fingerprint: refuse a server that holds any other split.
        protocol: ``masked`` waits for a pool of masks; ``auto`` begins at once with masks made just in time and goes
            over to the pool when that is filled; ``rlwe`` encrypts every row and needs no masks, but assumes that the
            server does not send wrong answers on purpose; ``clear`` hides nothing (only for servers started for tests).
        attention: ``local``, or ``rlwe``: full pages of the KV cache go encrypted to the server, which multiplies them
            with encrypted queries and probabilities. It, too, assumes an honest server, and costs far more traffic.
            page_tokens: tokens of a page, fewer than fit, for tests.
        bandwidth_mbit: of the network, in Mbit/s: what just-in-time masks and ``rlwe`` are planned for.
        pool: folder of the mask pool; None keeps one per model in the user's data folder. passphrase: seals it.
        batch: mask slots made at a time, a multiple of 64, at most 2048. low_water: refill in the background below
            this many (an eighth of a batch by default; 0 waits until none is left).
        refill: False raises PoolExhaustedError when the masks run out. provision: fill an empty pool at once, rather
            than at the first use.
        check_vectors: wrong answers pass with probability 2^-32 for each; 0 turns the check off. None takes as many as
            the pool was made with, or one.
        cache: where client bundles are kept. state_dir: where the ledger of used masks lives on this host.
        device: for the local part of the model. timeout_s: longest wait for one answer. retry_s: how long a server
            may be away, without any progress, before the answer is given up; another one of the same groups is asked
            at once.
        on_bundle, on_plan, on_provision, on_notice: progress callbacks. Without on_plan and on_notice what they would
            be told is logged, since it costs minutes and gigabytes.

    Returns:
        A ``transformers`` model in eval mode, its tokenizer, and the session to close when done.

    Raises:
        TransportError, AuthError: the server cannot be reached or refuses the token.
        BundleError: the bundle is damaged or asks for something a client does not accept.
        FingerprintError: the server, or the pool, belongs to another split, or two servers differ.
        PoolError: the mask pool cannot be used, or ``batch`` cannot be made.
        RangeError: a target is named twice, another argument has a value that means nothing, or this machine does not
            have the device.
    """
    check_batch(batch)
    if protocol not in _ON_THE_WIRE:
        raise ProtocolError(f"protocol {protocol!r} does not exist: use one of {', '.join(_ON_THE_WIRE)}")
    if attention not in ("local", "rlwe"):
        raise ProtocolError(f"attention {attention!r} does not exist: use local or rlwe")
    if attention == "rlwe" and attn_implementation:
        raise ProtocolError("attention='rlwe' is an attention implementation of its own: leave the other out")
    if check_vectors is not None and (not _is_whole(check_vectors) or check_vectors not in (0, 1, 2)):
        raise RangeError(f"check_vectors is 0, 1 or 2, not {check_vectors}")
    if not _is_number(bandwidth_mbit) or not 0 < bandwidth_mbit < math.inf:
        raise RangeError(f"bandwidth_mbit is a positive number, not {bandwidth_mbit}")
    if low_water is not None and (not _is_whole(low_water) or low_water < 0):
        raise RangeError(f"low_water is a number of masks, 0 or more, not {low_water}")
    if page_tokens is not None and (not _is_whole(page_tokens) or page_tokens < 1):
        raise RangeError(f"page_tokens is a number of tokens, at least 1, not {page_tokens}")
    _check_passphrase(passphrase)
    _check_folder("cache", cache, BundleError)
    _check_folder("pool", pool, PoolError)
    _check_folder("state_dir", state_dir, PoolError)
    check_device(device)
    connection = Connection(target, token=token, ca=Path(ca) if ca else None, timeout_s=timeout_s, retry_s=retry_s)
    try:
        manifest = connection.manifest
        if fingerprint is not None and manifest.fingerprint != fingerprint:
            raise FingerprintError(
                "the server holds another split than the fingerprint given: ask the provider which it is"
            )
        if not _ON_THE_WIRE[protocol] <= set(connection.protocols):
            raise ProtocolError(f"the server does not offer protocol {protocol!r}")
        if attention == "rlwe" and pb.PROTOCOL_RLWE not in connection.protocols:
            raise ProtocolError("the server does not offer encrypted attention")
        choices = prices(bandwidth_mbit * 125_000)
        folder = fetch_bundle(connection, cache=Path(cache) if cache else None, progress=on_bundle)
        # Before any mask is made: what is wrong with a bundle, its sizes above all, shows here.
        model = build_model(
            folder,
            manifest,
            connection.timings,
            device=device,
            attn_implementation=IMPLEMENTATION if attention == "rlwe" else attn_implementation,
        )
        encrypted = EncryptedAttention(connection, page_tokens) if attention == "rlwe" else None
        if encrypted:
            use_encrypted_cache(model, encrypted)
        tokenizer = load_tokenizer(folder, model)
        keeper: Keeper | None = None
        linear: LinearProtocol
        watch = Watch()
        if protocol == "clear":
            linear = ClearProtocol(connection, watch)
        elif protocol == "rlwe":
            count = 1 if check_vectors is None else check_vectors
            checks = connection.retrying(lambda: fetch_check_vectors(connection, count, on_provision))
            linear = RlweProtocol(connection, checks, choices, watch)
        else:
            pooled = keeper = _keeper(
                connection,
                pool=Path(pool) if pool else user_data_path("sordino") / "pools" / manifest.fingerprint,
                passphrase=passphrase,
                state_dir=Path(state_dir) if state_dir else None,
                batch=batch,
                low_water=batch // 8 if low_water is None else low_water,
                refill=refill,
                provision=provision and protocol == "masked",
                check_vectors=check_vectors,
                on_plan=on_plan,
                on_provision=on_provision,
                on_notice=on_notice,
            )
            if protocol == "auto":
                keeper = AutoKeeper(pooled, JustInTime(connection, pooled.check, choices), fill=refill)
            linear = MaskedProtocol(connection, keeper, watch, protocol)
        attach(model, linear)
        # Before torch, too, whose own threads a forked child would wait for.
        model.register_forward_pre_hook(lambda *_: connection.owner.check())
    except BaseException:
        connection.close()
        raise
    return Connected(model, tokenizer, Session(connection, linear, keeper, encrypted, watch))


def _keeper(
    connection: Connection,
    *,
    pool: Path,
    passphrase: str | None,
    state_dir: Path | None,
    batch: int,
    low_water: int,
    refill: bool,
    provision: bool,
    check_vectors: int | None,
    on_plan: Notify | None,
    on_provision: Progress | None,
    on_notice: Notify | None,
) -> PoolKeeper:
    manifest = connection.manifest
    opened = MaskPool.open_or_create(pool, manifest, passphrase=passphrase, state_dir=state_dir)
    keeper = PoolKeeper(
        connection,
        opened,
        batch=batch,
        low_water=low_water,
        refill=refill,
        notify=on_notice or log.warning,
        progress=on_provision,
    )
    try:
        fill = provision and refill and not opened.slots_left
        if fill:
            limit = connection.max_message_bytes
            count = 1 if check_vectors is None else check_vectors
            (on_plan or log.warning)(describe_plan(plan_batch(manifest, batch, checks=count, max_message_bytes=limit)))
        keeper.prepare(check_vectors)
        if fill:
            keeper.fill_now()
    except BaseException:
        opened.close()
        raise
    return keeper


def check_batch(slots: int) -> None:
    """Refuses a size of batch that cannot be made, before anything is sent or printed.

    Raises:
        PoolError: it is not a multiple of 64 up to 2048.
    """
    if type(slots) is not int or slots % CHUNK or not 0 < slots <= PARAMS.n:
        raise PoolError(f"a batch has a multiple of {CHUNK} slots, from {CHUNK} to {PARAMS.n}; not {slots}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _check_folder(name: str, path: str | Path | None, kind: type[SordinoError]) -> None:
    """What cannot be a folder, before anything is sent; whether it can be written shows later."""
    try:
        if path is not None and not stat.S_ISDIR(Path(path).stat().st_mode):
            raise kind(f"{name} {str(path)!r} is not a folder")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # the latter of a NUL
        why = getattr(error, "strerror", None) or error
        raise kind(f"{name} {str(path)[:100]!r} cannot be a folder: {why}") from None


def _check_passphrase(passphrase: str | None) -> None:
    try:
        (passphrase or "").encode()
    except UnicodeEncodeError:
        raise PoolSealedError("the passphrase has bytes that are not UTF-8") from None


def describe_plan(plan: ProvisionPlan) -> str:
    """One line on what a batch will cost."""
    return (
        f"provisioning {plan.slots} tokens: {plan.up_bytes / 1e6:,.0f} MB up, {plan.down_bytes / 1e6:,.0f} MB down "
        f"({plan.bytes_per_token / 1e6:.2f} MB a token), {plan.disk_bytes / 1e6:,.0f} MB of disk, "
        f"{plan.check_bytes / 1e6:,.0f} MB once for check vectors"
    )
