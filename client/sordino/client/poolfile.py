"""What a mask pool keeps on disk: the keys of its batches, their products W r, and how both are encrypted.

Keys. A batch begins with a random chain key. For chunk c (64 slots)::

    chunk_c = HKDF(chain_c, "chunk")     chain_{c+1} = HKDF(chain_c, "next")
    mask key = HKDF(chunk_c, "mask")     data key = HKDF(chunk_c, "data")

Only the chain key of the next unreserved chunk is stored, so forgetting a chunk's key erases its masks and products:
neither follows from later keys (HKDF-SHA256 is one-way). Masks are expanded from the mask key and stored nowhere.

Products. The batch's data file is an array of chunks, each an array of records, one per group in the manifest's order:
AES-256-GCM (NIST SP 800-38D) of ``[64, m]`` little-endian uint32 under the chunk's data key. The nonce is the group's
index: each pair of key and nonce encrypts once, since a group is written once.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from sordino.client.ledger import Staged, open_private, read_private, remove, stage, write_all
from sordino.client.prg import uniform_mod_p
from sordino.client.vault import Vault
from sordino.shared.errors import PoolError
from sordino.shared.manifest import GroupSpec
from sordino.shared.prg import KEY_BYTES, derive

U32 = NDArray[np.uint32]

CHUNK: Final = 64
"""Slots that share one key and are reserved together."""
_NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_PAGE: Final = 4096
_KEYS_FORMAT: Final = 2
_PUNCH: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h

BATCH_NAME: Final = re.compile(r"^[0-9]{8}-[0-9a-f]{32}$")
OWN_FILE: Final = re.compile(r"^(pool\.json|check\.bin|[0-9]{8}-[0-9a-f]{32}\.(keys|data|part))(\.[0-9a-f]{12}\.tmp)?$")
"""Names of the files of a pool; nothing else in the folder is ever deleted."""


# -- keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Opens one chunk of a batch: expands its masks, decrypts its products."""

    mask: bytes = field(repr=False)
    data: bytes = field(repr=False)

    def masks(self, index: int, group: GroupSpec) -> U32:
        """``[64, n]`` ring elements of the group at ``index`` of the manifest."""
        flat = uniform_mod_p(self.mask, b"group %d" % index, CHUNK * group.in_features)
        return flat.reshape(CHUNK, group.in_features)


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The state of a batch on disk: the chain key of its chunk ``used``, the first one that is not reserved.

    ``checks`` names the check vectors that its products were checked under; empty without any.
    """

    name: str
    chunks: int
    used: int
    chain: bytes = field(repr=False)
    checks: str = ""

    def ratchet(self) -> tuple[ChunkKeys, BatchKeys]:
        """The keys of chunk ``used``, and the state after it, from which they do not follow."""
        chunk = derive(self.chain, b"pool/chunk")
        keys = ChunkKeys(derive(chunk, b"pool/mask"), derive(chunk, b"pool/data"))
        return keys, replace(self, used=self.used + 1, chain=derive(self.chain, b"pool/next"))

    def forward_to(self, used: int) -> BatchKeys:
        """Skips chunks that another copy of the pool, or a process that died, has reserved."""
        state = self
        while state.used < used:
            _, state = state.ratchet()
        return state

    def stage(self, folder: Path, vault: Vault) -> Staged:
        body = {
            "format": _KEYS_FORMAT,
            "chunks": self.chunks,
            "used": self.used,
            "chain": self.chain.hex(),
            "checks": self.checks,
        }
        return stage(_keys_path(folder, self.name), vault.wrap(self.name, json.dumps(body).encode()))

    @classmethod
    def load(cls, folder: Path, name: str, vault: Vault) -> BatchKeys:
        """
        Raises:
            PoolError: the file is damaged.
        """
        body = vault.unwrap(name, read_private(_keys_path(folder, name)))
        try:
            raw = json.loads(body)
            state = cls(name, raw["chunks"], raw["used"], bytes.fromhex(raw["chain"]), str(raw["checks"]))
            if raw["format"] != _KEYS_FORMAT or len(state.chain) != KEY_BYTES or not 0 <= state.used <= state.chunks:
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise PoolError(
                f"the keys of batch {name} are malformed or of another release: delete the pool's folder"
            ) from error
        return state


def _keys_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.keys"


def data_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.data"


def erase_batch(folder: Path, name: str) -> None:
    """Keys first: without them the rest is noise."""
    remove(_keys_path(folder, name), overwrite=True)
    remove(data_path(folder, name))


# -- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the record of a chunk and a group lies in a data file. Offsets and sizes in bytes."""

    groups: tuple[GroupSpec, ...]
    offsets: tuple[int, ...]
    stride: int

    @classmethod
    def of(cls, groups: tuple[GroupSpec, ...]) -> Layout:
        offsets, end = [], 0
        for group in groups:
            offsets.append(end)
            end += 4 * CHUNK * group.out_features + TAG_BYTES
        return cls(groups, tuple(offsets), -(-end // _PAGE) * _PAGE)  # whole pages, so that a hole frees all of them

    def record(self, chunk: int, group: int) -> tuple[int, int]:
        """(offset, size)"""
        return (
            chunk * self.stride + self.offsets[group],
            4 * CHUNK * self.groups[group].out_features + TAG_BYTES,
        )


def _context(name: str, chunk: int, group: int) -> bytes:
    return f"sordino batch {name} {chunk} {group}".encode()


class DataFile:
    """An open data file; closes itself when nothing refers to it. An open one can be read after it was unlinked."""

    def __init__(self, fd: int, name: str, layout: Layout) -> None:
        self.fd = fd
        self.name = name
        self._layout = layout
        self.close: Callable[[], Any] = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, folder: Path, name: str, layout: Layout) -> DataFile:
        return cls(open_private(data_path(folder, name), os.O_RDWR), name, layout)

    def write(self, chunk: int, group: int, keys: ChunkKeys, products: U32) -> None:
        """Encrypts ``[64, m]`` to its place."""
        plain = np.ascontiguousarray(products, dtype="<u4")
        sealed = AESGCM(keys.data).encrypt(_nonce(group), plain.data.cast("B"), _context(self.name, chunk, group))
        write_all(self.fd, sealed, self._layout.record(chunk, group)[0])

    def read(self, chunk: int, group: int, keys: ChunkKeys) -> U32:
        """``[64, m]`` uint32.

        Raises:
            PoolError: what is there is not what was written.
        """
        offset, size = self._layout.record(chunk, group)
        spec = self._layout.groups[group]
        try:
            raw = os.pread(self.fd, size, offset)
            plain = AESGCM(keys.data).decrypt(_nonce(group), raw, _context(self.name, chunk, group))
        except (InvalidTag, ValueError, OSError) as error:
            raise PoolError(
                f"batch {self.name}, chunk {chunk}, group {spec.name!r}: damaged or changed file. Its masks are "
                "skipped; if this happens again, delete the pool's folder and provision again"
            ) from error
        # A copy, since an array over bytes cannot be written to, and compiled kernels would need a second variant.
        return np.frombuffer(plain, dtype="<u4").astype(np.uint32).reshape(CHUNK, spec.out_features)

    def erase(self, chunk: int) -> None:
        """Gives the space of a used chunk back. Best effort: what protects it is that its key is gone."""
        offset, size = chunk * self._layout.stride, self._layout.stride
        if not fallocate(self.fd, _PUNCH, offset, size):
            write_all(self.fd, bytes(size), offset)


def _nonce(group: int) -> bytes:
    return group.to_bytes(_NONCE_BYTES, "little")


def fallocate(fd: int, mode: int, offset: int, size: int) -> bool:
    """fallocate(2): False where system or file system have none.

    Raises:
        OSError: it has, and failed: no space, or over a limit.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(size)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))
