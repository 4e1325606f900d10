"""The generator of point functions: AES-128 under fixed public keys, H_k(s) = AES_k(s) xor s.

That s -> H_0(s) || H_1(s) || ... is a pseudo-random generator rests on AES under fixed keys being like random
permutations (Guo, Katz, Wang and Yu, ePrint 2019/074). Keys 0 and 1 make the children of a node, keys 2 and 3 what its
leaves are made of; they hide nothing, and differ so that no two outputs of a seed are the same. All seeds stand under
the same keys, so T guesses find one of N seeds with probability N T / 2^127 (Guo, Katz, Wang, Weng and Yu, ePrint
2019/1168, attack garbled circuits so); a million tokens of SmolLM2 take about 2^44.

A node is a block of 16 bytes, two little-endian ``uint64``: its lowest bit is the node's control bit, the other 127 are
its seed. The control bit does not enter H.

Two ways give the same bits: ``cryptography``, one call a key, and a loop compiled for the AES instructions of x86, used
where the processor has them and a known-answer test is passed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB
from llvmlite import ir  # type: ignore[import-untyped]
from numba import config, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from sordino.shared.jit import compiled

log = logging.getLogger(__name__)

U64 = NDArray[np.uint64]
R = TypeVar("R")

CHILDREN: Final = 0
LEAVES: Final = 2
# Nobody chose them: the first bytes of hashes of their names.
KEYS: Final = tuple(hashlib.sha256(b"sordino two-party point function key %d" % i).digest()[:16] for i in range(4))
_ROUNDS: Final = 10
_SEED: Final = np.array([2**64 - 2, 2**64 - 1], np.uint64)


class Hash(Protocol):
    """One way to compute H; ``name`` goes to the log, ``compiled`` says whether compiled callers can do the same."""

    name: str
    compiled: bool

    def __call__(self, nodes: U64, size: int, first: int, count: int, out: U64) -> None:
        """As :func:`hash_into`."""
        ...


class LibraryHash:
    """``cryptography``'s AES: the reference, and the way of other processors."""

    name = "cryptography"
    compiled = False

    def __call__(self, nodes: U64, size: int, first: int, count: int, out: U64) -> None:
        seeds = (nodes[:size] & _SEED).astype("<u8", copy=False)
        raw = seeds.tobytes()
        for k in range(count):
            # Blocks are inputs of a permutation here, not parts of a message.
            stream = Cipher(AES128(KEYS[first + k]), ECB()).encryptor()  # noqa: S305
            out[k, :size] = np.frombuffer(stream.update(raw), "<u8").reshape(-1, 2) ^ seeds


def _features() -> frozenset[str]:
    """What the processor that kernels are compiled for can do, in LLVM's words; empty when nothing is compiled."""
    if config.DISABLE_JIT:
        return frozenset()
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def _lanes(features: frozenset[str]) -> int:
    """64-bit lanes of the widest vector with AES instructions, 0 without.

    Asked before anything is compiled: LLVM ends the process when an instruction is missing.
    """
    if "+aes" not in features:
        return 0
    if "+vaes" in features and "+avx512f" in features:
        return 8
    return 4 if "+vaes" in features and "+avx2" in features else 2


_LANES: Final = _lanes(_features())
_AT_ONCE: Final = 8  # vectors: an AES instruction takes four cycles, and two can start in each
_STEP: Final = _AT_ONCE * _LANES // 2  # blocks


def _hash_step(_context: Any, nodes: Any, start: Any, keys: Any, key: Any, out: Any, row: Any) -> Any:
    """``out[row, start + i] = H_key(nodes[start + i])`` for ``_STEP`` blocks; ``keys [keys, 11, 2]`` are round keys."""
    if {nodes.layout, keys.layout, out.layout} != {"C"}:
        return None  # numba then says that it cannot compile the call
    signature = types.void(nodes, start, keys, key, out, row)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, vector = ir.IntType(64), ir.VectorType(ir.IntType(64), _LANES)
        suffix = "" if _LANES == 2 else f".{64 * _LANES}"
        one, last = (
            cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector, vector]), f"llvm.x86.aesni.{name}{suffix}"
            )
            for name in ("aesenc", "aesenclast")
        )
        source, schedule, target = (context.make_array(sig.args[i])(context, builder, value=args[i]) for i in (0, 2, 4))

        def pointer(data: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def constant(value: int) -> Any:
            return ir.Constant(word, value)

        pair = ir.VectorType(word, 2)
        first_key = builder.mul(args[3], constant(2 * (_ROUNDS + 1)))
        round_keys = []
        for i in range(_ROUNDS + 1):
            at = pointer(schedule.data, builder.add(first_key, constant(2 * i)), pair)
            short = builder.load(at, align=8)
            order = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [j % 2 for j in range(_LANES)])
            round_keys.append(builder.shuffle_vector(short, short, order))
        seed_bits = ir.Constant(vector, [-2 if j % 2 == 0 else -1 for j in range(_LANES)])
        begin = builder.mul(args[1], constant(2))
        seeds = []
        for i in range(_AT_ONCE):
            at = pointer(source.data, builder.add(begin, constant(_LANES * i)), vector)
            seeds.append(builder.and_(builder.load(at, align=8), seed_bits))
        states = [builder.xor(seed, round_keys[0]) for seed in seeds]
        for i in range(1, _ROUNDS):
            states = [builder.call(one, [state, round_keys[i]]) for state in states]
        states = [builder.call(last, [state, round_keys[_ROUNDS]]) for state in states]
        size = cgutils.unpack_tuple(builder, target.shape)[1]
        begin = builder.mul(builder.add(builder.mul(args[5], size), args[1]), constant(2))
        for i, (state, seed) in enumerate(zip(states, seeds, strict=True)):
            at = pointer(target.data, builder.add(begin, constant(_LANES * i)), vector)
            builder.store(builder.xor(state, seed), at, align=8)
        return context.get_dummy_value()

    return signature, build


_hash_step_intrinsic: Any = intrinsic(_hash_step)


@compiled
def _hash_all(nodes: U64, size: int, keys: U64, first: int, count: int, out: U64) -> None:
    """As :func:`hash_into`; what is left over after whole steps goes through a buffer of one step."""
    whole = size - size % _STEP
    for start in range(0, whole, _STEP):
        for k in range(count):
            _hash_step_intrinsic(nodes, start, keys, first + k, out, k)
    if whole < size:
        rest, made = np.zeros((_STEP, 2), np.uint64), np.empty((1, _STEP, 2), np.uint64)
        for i in range(whole, size):
            rest[i - whole, 0], rest[i - whole, 1] = nodes[i, 0], nodes[i, 1]
        for k in range(count):
            _hash_step_intrinsic(rest, 0, keys, first + k, made, 0)
            for i in range(whole, size):
                out[k, i, 0], out[k, i, 1] = made[0, i - whole, 0], made[0, i - whole, 1]


class InstructionHash:
    """The AES instructions of x86, eight vectors at a time."""

    name = f"x86-{64 * _LANES}"
    compiled = True

    def __call__(self, nodes: U64, size: int, first: int, count: int, out: U64) -> None:
        _hash_all(nodes, size, _SCHEDULES, first, count, out)


def round_keys(key: bytes) -> U64:
    """The key schedule of AES-128, ``[11, 2]`` (FIPS 197, section 5.2; the S-box by its definition, 5.1.1)."""
    box = _s_box()
    words = [key[4 * i : 4 * i + 4] for i in range(4)]
    constant = 1
    for i in range(4, 4 * (_ROUNDS + 1)):
        word = words[-1]
        if i % 4 == 0:
            word = bytes([box[word[1]] ^ constant, box[word[2]], box[word[3]], box[word[0]]])
            constant = _times(constant, 2)
        words.append(bytes(a ^ b for a, b in zip(words[-4], word, strict=True)))
    return np.frombuffer(b"".join(words), "<u8").reshape(-1, 2).astype(np.uint64)


def _times(a: int, b: int) -> int:
    """Product in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1."""
    out = 0
    while b:
        out ^= a if b & 1 else 0
        a = a << 1 ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return out


@cache
def _s_box() -> bytes:
    powers = [1]
    while len(powers) < 255:  # of 3, which generates the group
        powers.append(_times(powers[-1], 3))
    inverse = [0] * 256
    for i, power in enumerate(powers):
        inverse[power] = powers[-i % 255]
    turned = [[(b << k | b >> (8 - k)) & 0xFF for k in range(5)] for b in inverse]
    return bytes(t[0] ^ t[1] ^ t[2] ^ t[3] ^ t[4] ^ 0x63 for t in turned)


_SCHEDULES: Final = np.stack([round_keys(key) for key in KEYS])


def known_answer_test(way: Hash) -> bool:
    """Whether ``way`` gives the bits of ``cryptography``, for whole steps and for what is left over."""
    data = np.frombuffer(hashlib.shake_256(b"sordino point functions").digest(16 * 77), "<u8").reshape(-1, 2)
    nodes = data.astype(np.uint64)
    for size in (1, 64, 77):
        for first, count in ((CHILDREN, 2), (LEAVES, 1), (LEAVES, 2)):
            made, expected = np.zeros((2, count, 77, 2), np.uint64)
            way(nodes, size, first, count, made)
            LibraryHash()(nodes, size, first, count, expected)
            if not np.array_equal(made, expected):
                return False
    return True


@cache
def chosen() -> Hash:
    """The fastest way that passes its known-answer test."""
    if _LANES:
        way = InstructionHash()
        if known_answer_test(way):
            return way
        log.warning("the AES kernel %s fails its known-answer test: not used", way.name)
    return LibraryHash()


def hash_into(nodes: U64, size: int, first: int, count: int, out: U64) -> None:
    """H of the first ``size`` of ``nodes [*, 2]`` under keys first to first + count - 1: to ``out [count, :size, 2]``.

    Also for compiled callers, where :func:`in_loops` allows it; arrays are contiguous then.
    """
    chosen()(nodes, size, first, count, out)


def _in_compiled(nodes: Any, size: Any, first: Any, count: Any, out: Any) -> Any:  # noqa: ARG001
    # Numba compares the two lists of arguments, with their types as they are written.
    def body(nodes: Any, size: Any, first: Any, count: Any, out: Any) -> Any:
        _hash_all(nodes, size, _SCHEDULES, first, count, out)

    return body


overload(hash_into)(_in_compiled)


def hashed(nodes: U64, first: int, count: int) -> U64:
    """H of each of ``nodes [m, 2]`` under keys ``first`` to ``first + count - 1``: ``[count, m, 2]``."""
    out = np.empty((count, len(nodes), 2), np.uint64)
    hash_into(np.ascontiguousarray(nodes), len(nodes), first, count, out)
    return out


def in_loops(loop: Callable[..., R]) -> Callable[..., R]:
    """``loop``, compiled if the chosen way can be called from compiled code, and else as it is.

    Its body calls :func:`hash_into`, and is the same for both.
    """
    fast = compiled(loop)

    @wraps(loop)
    def call(*arguments: Any) -> R:
        return (fast if chosen().compiled else loop)(*arguments)

    return call
