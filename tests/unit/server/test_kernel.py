"""Ring kernels: exact for every value, and never used where they are not. Runs under ONEDNN_MAX_CPU_ISA=AVX2 too."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.server import kernel as k
from sordino.shared.errors import ProtocolError
from sordino.shared.ring import P

CPU = torch.device("cpu")
EDGES = [0, 1, P - 1, P // 2, P // 2 + 1, 0x7F7F7F7F, 0x7F7F7F80, 0x80808080 % P, 0x80, 0xFFFF, 0x10000]


def chosen() -> k.RingKernel:
    return k.choose_kernel(CPU)


def matrix(m: int, n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-127, 128, (m, n), dtype=np.int8))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(EDGES) | st.integers(0, P - 1), min_size=9, max_size=9),
    st.lists(st.integers(-127, 127), min_size=9, max_size=9),
)
def test_chosen_kernel_equals_python_integers(row: list[int], weights: list[int]) -> None:
    w = np.array(weights, np.int8).reshape(1, 9)
    u = np.array(row, np.uint32).reshape(1, 9)
    got = chosen().matmul(torch.from_numpy(w), u)
    assert got.tolist() == k.reference_matmul(w, u).tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 13), (96, 64), (33, 1536)])
def test_every_sound_kernel_agrees(rows: int, m: int, n: int) -> None:
    w = matrix(m, n, 1)
    u = np.random.default_rng(rows).integers(0, P, (rows, n), dtype=np.uint32)
    expected = (u.astype(object) @ w.numpy().T.astype(object)) % P
    for kernel in (chosen(), k.Float64Kernel()):
        assert (kernel.matmul(w, u) == expected).all(), kernel.name


def test_kernel_that_saturates_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of oneDNN without VNNI: one side is made unsigned, and pairs of products saturate at 16 bits."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        signed = b.to(torch.int32)
        products = (a.to(torch.int32) + 128)[:, :, None] * signed[None]
        pairs = products.view(a.shape[0], -1, 2, b.shape[1]).sum(2).clamp(-32768, 32767)
        return (pairs.sum(1) - 128 * signed.sum(0)).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not k.known_answer_test(k.Int8Kernel(), CPU)
    assert k.choose_kernel(CPU).name == "float64"


@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2", reason="only means something under AVX2")
def test_without_vnni_the_fallback_is_taken() -> None:
    """Whatever oneDNN does there, the chosen kernel is exact (the tests above ran under the same variable)."""
    works = k.known_answer_test(k.Int8Kernel(), CPU)
    assert chosen().name == ("int8-cpu" if works else "float64")


def test_planes_are_combined() -> None:
    rng = np.random.default_rng(5)
    whole = rng.integers(-2047, 2048, (11, 40))
    low = ((whole + 128) & 255) - 128
    high = (whole - low) >> 8
    planes = torch.from_numpy(np.concatenate([low, high]).astype(np.int8))
    u = rng.integers(0, P, (3, 40), dtype=np.uint32)
    got = k.RingMatrix(planes, 2, chosen()).matmul(u)
    assert (got == (u.astype(object) @ whole.T.astype(object)) % P).all()


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"expected \[\*, 5\]"):
        k.RingMatrix(matrix(2, 5, 0), 1, chosen()).matmul(np.zeros((1, 6), np.uint32))


def test_torch_kernel_pads_and_agrees() -> None:
    """The arithmetic of the CUDA path, run on the CPU where its int8 product is sound."""
    kernel = k.TorchInt8Kernel()
    if not k.known_answer_test(kernel, CPU):
        assert chosen().name == "float64"
        return
    w, u = matrix(13, 21, 2), np.random.default_rng(0).integers(0, P, (3, 21), dtype=np.uint32)
    assert (kernel.matmul(w, u) == k.Float64Kernel().matmul(w, u)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_cuda_equals_cpu(rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    device = torch.device("cuda")
    w, u = matrix(129, 75, 3), np.random.default_rng(rows).integers(0, P, (rows, 75), dtype=np.uint32)
    assert k.choose_kernel(device).name == "int8-torch"
    assert (k.choose_kernel(device).matmul(w.to(device), u) == k.Float64Kernel().matmul(w, u)).all()
