"""Block products on a device: the bits of the compiled loops, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sordino.server import blockkernels
from sordino.server.blockkernels import (
    Answer,
    BlockKernel,
    CompiledBlocks,
    TorchBlocks,
    choose_block_kernel,
    known_answer_test,
)
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.kernel import RingMatrix, choose_kernel
from sordino.shared.packing import BlockShape, Part
from sordino.shared.rlwe import PARAMS, SWITCH_BITS

CPU = torch.device("cpu")
SHAPES = [
    BlockShape(1, 576, 3, 576, 20),
    BlockShape(1, 24, 85, 100, 90),  # padding on both sides
    BlockShape(8, 16, 16, 50, 40),
    BlockShape(32, 8, 8, 70, 24),
    BlockShape(256, 1, 8, 100, 9),
    BlockShape(2048, 1, 1, 7, 3),
]


def answers(kernel: BlockKernel, shape: BlockShape, bits: int, *, largest: bool = False) -> Answer:
    rng = np.random.default_rng(shape.rows)
    weights = rng.integers(-127, 128, (shape.out_features, shape.in_features)).astype(np.int8)
    primes = np.array(PARAMS.primes, np.uint32).reshape(1, 2, 1, 1)
    both = rng.integers(0, primes, (2, 2, PARAMS.n, shape.input_blocks), dtype=np.uint32)
    if largest:
        both, weights = np.broadcast_to(primes - 1, both.shape).copy(), np.full_like(weights, -127)
    halves = [weights[: shape.outputs], weights[shape.outputs :]] if shape.output_blocks > 1 else [weights]
    encoded = (
        kernel.encode(part, BlockShape(shape.rows, shape.inputs, shape.outputs, shape.in_features, part.shape[0]))
        for part in halves
    )
    return kernel.answer(encoded, [(both[0], both[1].__getitem__)], shape, bits)[0]


def assert_same(device: torch.device, shape: BlockShape, bits: int, *, largest: bool = False) -> None:
    wanted = answers(CompiledBlocks(parallel=True), shape, bits, largest=largest)
    got = answers(TorchBlocks(device), shape, bits, largest=largest)
    for a, b in zip(wanted, got, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


@pytest.mark.parametrize("bits", [0, SWITCH_BITS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_gives_the_bits_of_the_compiled_loops(shape: BlockShape, bits: int) -> None:
    assert_same(CPU, shape, bits)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
def test_the_largest_residues_are_exact(shape: BlockShape) -> None:
    assert_same(CPU, shape, 0, largest=True)


def test_sums_are_reduced_before_they_outgrow_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(PARAMS.primes) - 1
    assert largest * (1 << 14) * blockkernels._SUMMANDS <= 1 << 53
    monkeypatch.setattr(blockkernels, "_SUMMANDS", 32)
    assert_same(CPU, SHAPES[4], 0, largest=True)


def test_a_device_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_answer_test(TorchBlocks(CPU))
    monkeypatch.setattr(TorchBlocks, "_intt", lambda _, a: a)
    assert not known_answer_test(TorchBlocks(CPU))


def test_a_cpu_takes_the_compiled_loops() -> None:
    assert choose_block_kernel(CPU, parallel=False).name == "blocks-cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0, SWITCH_BITS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(shape: BlockShape, bits: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    assert_same(torch.device("cuda"), shape, bits)
    assert choose_block_kernel(torch.device("cuda"), parallel=False).name == "blocks-torch"


def test_weights_of_blocks_beyond_their_range_are_not_kept() -> None:
    """A block for one weight would take the cache 16 KB."""
    matrix = RingMatrix(torch.ones((64, 64), dtype=torch.int8), 1, choose_kernel(CPU))
    products = BlockProducts(1 << 30, CompiledBlocks(parallel=False))
    for shape, kept in ((BlockShape(1, 1, 2048, 64, 1), 0), (BlockShape(1, 64, 32, 64, 64), 8 * 64 * 64)):
        c0 = np.zeros((2, PARAMS.n, shape.input_blocks), np.uint32)
        part = Part(slice(0, shape.in_features), slice(0, shape.out_features), shape)
        products.products(matrix, Wanted(0, False, part, 0), [(bytes(32), c0)])
        assert sum(entry.size for entry in products._kept.values()) == kept
