"""Block products from the client's side: rows to a message, an answer to rows (:mod:`sordino.shared.packing`)."""

from __future__ import annotations

import os

import numpy as np

from sordino.client.rlwe import SecretKey
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import ProtocolError
from sordino.shared.manifest import GroupSpec
from sordino.shared.packing import Part, decode_rows, encode_rows, useful
from sordino.shared.ring import combine_planes
from sordino.shared.rlwe import PARAMS, SEED_BYTES, U32, expand_uniform, pack, unpack, unpack_switched


def request_of(
    index: int, group: GroupSpec, part: Part, rows: U32, key: SecretKey, *, transposed: bool = False, bits: int = 0
) -> pb.ProvisionRequest:
    """The message that asks for one part of W (or W^T) times ``rows [R, n]``, R <= part.shape.rows, encrypted.

    Args:
        index: of the group in the manifest.
        rows: ring elements, all inputs; the part says which are sent.
        key: encrypts under a fresh public seed, so a key may serve many messages.
        bits: modulus 2^bits of the answer; 0 for q.
    """
    shape, seed = part.shape, os.urandom(SEED_BYTES)
    c0 = key.encrypt(encode_rows(rows[:, part.inputs], shape), expand_uniform(seed, 0, (PARAMS.n, shape.input_blocks)))
    n, m = (group.out_features, group.in_features) if transposed else (group.in_features, group.out_features)
    block = pb.BlockProduct(
        rows=shape.rows, inputs=shape.inputs, outputs=shape.outputs, transposed=transposed, answer_bits=bits
    )
    if shape.in_features < n:
        block.first_input, block.input_count = part.inputs.start, shape.in_features
    if shape.out_features < m:
        block.first_output, block.output_count = part.outputs.start, shape.out_features
    return pb.ProvisionRequest(group=index, seed=seed, c0=pack(c0), block=block)


def result_of(
    index: int, group: GroupSpec, part: Part, answer: pb.ProvisionResponse, key: SecretKey, *, bits: int = 0
) -> U32:
    """What the server answered to :func:`request_of`: ``[part.shape.rows, outputs of the part]`` ring elements.

    Results of parts with the same outputs add up mod p.

    Raises:
        ProtocolError: the answer is of another group or size.
    """
    if answer.group != index:
        raise ProtocolError("the server answered another group than was asked")
    shape = part.shape
    blocks, read = group.planes * shape.output_blocks, useful(shape)
    if bits:
        c0 = unpack_switched(answer.c0, (read.size, blocks), bits)
        product = key.decrypt_switched(c0, unpack_switched(answer.c1, (PARAMS.n, blocks), bits), read, bits)
    else:
        halves = (2, PARAMS.n, blocks)
        product = key.decrypt(unpack(answer.c0, halves), unpack(answer.c1, halves))[read]
    rows = [decode_rows(plane, shape) for plane in np.split(product, group.planes, axis=1)]
    return combine_planes(np.concatenate(rows, axis=1), group.planes)
