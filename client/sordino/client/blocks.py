"""Block products from the client's side: rows to messages, answers to rows (:mod:`sordino.shared.packing`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sordino.client.rlwe import SecretKey
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.manifest import GroupSpec
from sordino.shared.packing import Part, Prices, decode_rows, encode_rows, plan, useful
from sordino.shared.ring import P, combine_planes
from sordino.shared.rlwe import (
    PARAMS,
    SEED_BYTES,
    SWITCH_BITS,
    U32,
    pack,
    unpack,
    unpack_switched,
)

# Seconds of both sides for a block that is encrypted, a block that is answered, and a message: fitted to products of
# 295 shapes of block on two cores (bench/planner.py).
_ENCRYPT_S: Final = 29e-6
_ANSWER_S: Final = 33e-6
_SWITCH_S: Final = 31e-6
_FOLD_S: Final = 24e-6
_MESSAGE_S: Final = 400e-6
# Rows to a block. More rows share more, but each of these shapes has encoded weights of its own on the server: a row of
# decoding, a few of speculation, masks ahead of need, a long prompt.
_STEPS: Final = (256, 32, 8, 1)


def prices(bandwidth: float) -> tuple[Prices, Prices]:
    """Seconds of a round, answers whole or switched, when ``bandwidth`` bytes a second pass between the two sides."""
    whole = Prices(encrypt=_ENCRYPT_S, answer=_ANSWER_S, answer_folded=_FOLD_S, byte=1 / bandwidth, message=_MESSAGE_S)
    switched = replace(whole, answer=_SWITCH_S, bits=SWITCH_BITS)
    return whole, switched


@dataclass(frozen=True, slots=True)
class Block:
    """One message's part of a product, and what its answer looks like."""

    index: int
    group: GroupSpec
    part: Part
    transposed: bool
    bits: int

    def encrypt(self, rows: U32, key: SecretKey) -> tuple[bytes, bytes, pb.BlockProduct]:
        """Seed, c0 and description of ``rows [R, n]``: ring elements, all inputs; the part says which are sent.

        The random half is of a fresh public seed, so a key may serve many messages.
        """
        shape, group, seed = self.part.shape, self.group, os.urandom(SEED_BYTES)
        polynomials = encode_rows(rows[:, self.part.inputs], shape)
        c0 = key.encrypt_seeded(polynomials, seed)
        n, m = (group.out_features, group.in_features) if self.transposed else (group.in_features, group.out_features)
        block = pb.BlockProduct(
            rows=shape.rows,
            inputs=shape.inputs,
            outputs=shape.outputs,
            transposed=self.transposed,
            answer_bits=self.bits,
        )
        if shape.in_features < n:
            block.first_input, block.input_count = self.part.inputs.start, shape.in_features
        if shape.out_features < m:
            block.first_output, block.output_count = self.part.outputs.start, shape.out_features
        return seed, pack(c0), block

    def bytes_up(self) -> int:
        return self.part.shape.upload_bytes()

    def bytes_down(self) -> int:
        return self.group.planes * self.part.shape.download_bytes(self.bits)

    def decrypt(self, packed0: bytes, packed1: bytes, key: SecretKey) -> U32:
        """The answer's rows, ``[part.shape.rows, outputs of the part]`` ring elements.

        Raises:
            ProtocolError: the answer has another size, or is no ciphertext.
        """
        shape = self.part.shape
        blocks, read = self.group.planes * shape.output_blocks, useful(shape)
        if self.bits:
            c0 = unpack_switched(packed0, (read.size, blocks), self.bits)
            c1 = unpack_switched(packed1, (PARAMS.n, blocks), self.bits)
            product = key.decrypt_switched(c0, c1, shape, self.bits)
        else:
            halves = (2, PARAMS.n, blocks)
            product = key.decrypt(unpack(packed0, halves), unpack(packed1, halves))[read]
        rows = [decode_rows(plane, shape) for plane in np.split(product, self.group.planes, axis=1)]
        return combine_planes(np.concatenate(rows, axis=1), self.group.planes)


def check_blocks(index: int, group: GroupSpec, count: int, max_message_bytes: int) -> list[Block]:
    """The product v^T W, that is W^T v: inputs are the outputs of the group. In the least traffic; none for no v."""
    if not count:
        return []
    parts = plan(
        1 << (count - 1).bit_length(),
        group.out_features,
        group.in_features,
        planes=group.planes,
        max_bytes=max_message_bytes,
    )
    return [Block(index, group, part, transposed=True, bits=0) for part in parts]


@dataclass(frozen=True, slots=True)
class Round:
    """The messages of one product of up to ``rows`` rows."""

    rows: int
    blocks: tuple[Block, ...]

    def requests(self, x: U32, key: SecretKey) -> list[pb.EvaluateRequest]:
        messages = []
        for block in self.blocks:
            seed, c0, wanted = block.encrypt(x, key)
            messages.append(pb.EvaluateRequest(group=block.index, seed=seed, data=c0, block=wanted))
        return messages

    def result(self, answers: Sequence[pb.EvaluateResponse], key: SecretKey, rows: int) -> U32:
        """``[rows, m]`` ring elements."""
        total = np.zeros((rows, self.blocks[0].group.out_features), np.uint64)
        for block, answer in zip(self.blocks, answers, strict=True):
            total[:, block.part.outputs] += block.decrypt(answer.data, answer.c1, key)[:rows]
        return (total % P).astype(np.uint32)

    def bytes_up(self) -> int:
        return sum(block.bytes_up() for block in self.blocks)

    def bytes_down(self) -> int:
        return sum(block.bytes_down() for block in self.blocks)


def rounds(
    index: int, group: GroupSpec, rows: int, *, max_message_bytes: int, choices: Sequence[Prices]
) -> Iterator[Round]:
    """The cheapest products for ``rows`` rows, in blocks that are half full at least."""
    while rows > 0:
        step = next(step for step in _STEPS if 2 * rows >= step)
        found = [
            (
                plan(
                    step,
                    group.in_features,
                    group.out_features,
                    planes=group.planes,
                    max_bytes=max_message_bytes,
                    prices=choice,
                ),
                choice,
            )
            for choice in choices
        ]
        parts, choice = min(found, key=lambda f: f[1].of(f[0], group.planes))
        yield Round(
            min(step, rows), tuple(Block(index, group, part, transposed=False, bits=choice.bits) for part in parts)
        )
        rows -= step
