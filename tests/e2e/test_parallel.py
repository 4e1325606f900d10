"""Tensor and pipeline parallel: several processes give the bits of one; a rank that dies costs time, not an answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from stack import (
    ServerProcess,
    answer,
    check_message,
    connect_to,
    masks_message,
    opening,
    rows_message,
    send_raw,
    split_tiny,
)

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import UnknownGroupError
from sordino.shared.manifest import ModelManifest
from sordino.shared.packing import plan
from sordino.shared.rlwe import PARAMS, SWITCH_BITS, pack
from sordino.shared.transport import status_of

TOKENS = 6
STAGES = {1: ("",), 2: ("0-0", "1-1")}


@pytest.fixture(scope="module", params=[8, pytest.param(12, marks=pytest.mark.slow)])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_tiny("llama", tmp_path_factory.mktemp("parallel"), weight_bits=request.param)


def start(stack: ExitStack, bundle: Path, tmp: Path, ranks: int, stages: int) -> list[ServerProcess]:
    servers = []
    for number, layers in enumerate(STAGES[stages]):
        options = ("--tensor-parallel", str(ranks)) if ranks > 1 else ()
        options += ("--layers", layers) if layers else ()
        server = ServerProcess(bundle, tmp / f"{ranks}-{stages}-{number}", allow_clear=True, arguments=options)
        servers.append(stack.enter_context(server))
    return servers


def block_message(manifest: ModelManifest, group: int, rows: int, bits: int) -> bytes:
    spec = manifest.groups[group]
    shape = plan(rows, spec.in_features, spec.out_features)[0].shape
    size = (2, PARAMS.n, shape.input_blocks)
    c0 = pack(np.random.default_rng(group).integers(0, min(PARAMS.primes), size, dtype=np.uint32))
    block = pb.BlockProduct(rows=rows, inputs=shape.inputs, outputs=shape.outputs, answer_bits=bits)
    return pb.EvaluateRequest(id=2, group=group, seed=bytes(range(32)), data=c0, block=block).SerializeToString()


def raw_answers(servers: list[ServerProcess]) -> list[tuple[bytes, bytes]]:
    """Everything a server computes, for every group, from the server that holds it."""
    manifest, found = servers[0].manifest, []
    for group in range(len(manifest.groups)):
        server = servers[manifest.groups[group].layer if len(servers) > 1 else 0]
        rows = [rows_message(manifest, group, rows=count) for count in (1, 5, 300)]
        blocks = [block_message(manifest, group, count, bits) for count in (1, 8) for bits in (0, SWITCH_BITS)]
        for protocol, messages in ((pb.PROTOCOL_MASKED, rows), (pb.PROTOCOL_RLWE, blocks)):
            answers, status, text = send_raw(server, "Evaluate", [opening(manifest, protocol), *messages])
            assert len(answers) == 1 + len(messages), (status, text)
            found += [
                (pb.EvaluateResponse.FromString(raw).data, pb.EvaluateResponse.FromString(raw).c1)
                for raw in answers[1:]
            ]
        messages = [masks_message(manifest, group), check_message(manifest, group)]
        answers, status, text = send_raw(server, "Provision", messages)
        assert len(answers) == 2, (status, text)
        found += [(one.c0, one.c1) for one in map(pb.ProvisionResponse.FromString, answers)]
    return found


@pytest.fixture(scope="module")
def expected(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    with ExitStack() as stack:
        return raw_answers(start(stack, bundle, tmp_path_factory.mktemp("one"), 1, 1))


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(2, 1), (1, 2), *(pytest.param(*both, marks=pytest.mark.slow) for both in ((3, 1), (4, 1), (2, 2), (4, 2)))],
)
def test_answers_are_the_bits_of_one_process(
    bundle: Path, expected: list[tuple[bytes, bytes]], tmp_path: Path, ranks: int, stages: int
) -> None:
    with ExitStack() as stack:
        assert raw_answers(start(stack, bundle, tmp_path, ranks, stages)) == expected


def test_a_stage_says_what_it_does_not_hold(bundle: Path, tmp_path: Path) -> None:
    with ServerProcess(bundle, tmp_path, arguments=("--layers", "1-1")) as server:
        manifest = server.manifest
        (raw,), status, _ = send_raw(server, "GetManifest", [b""])
        response = pb.GetManifestResponse.FromString(raw)
        held = [index for index, group in enumerate(manifest.groups) if group.layer == 1]
        assert (response.first_group, response.group_count) == (held[0], len(held))
        _, status, text = send_raw(server, "Evaluate", [opening(manifest), rows_message(manifest, 0)])
        assert status == status_of(UnknownGroupError())
        assert "this server has" in text


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, bundles: Callable[..., Path]) -> Iterator[ServerProcess]:
    options = ("--tensor-parallel", "2")
    with ServerProcess(
        bundles("llama"), tmp_path_factory.mktemp("ranked"), allow_clear=True, arguments=options
    ) as server:
        yield server


def rank_of(server: ServerProcess, number: int) -> psutil.Process:
    """The process of a rank."""
    children = psutil.Process(server._alive.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(number))


def test_a_rank_that_is_killed_costs_time_alone(ranked: ServerProcess, tmp_path: Path) -> None:
    """In the middle of an answer: all ranks start anew, the client sends its row again, and no token differs."""
    with (clear := connect_to(ranked, tmp_path / "clear", protocol="clear")).session:
        wanted = answer(clear, tokens=12)
    with (masked := connect_to(ranked, tmp_path / "masked", retry_s=90)).session:
        seen = 0

        def kill(*_: object) -> bool:
            nonlocal seen
            seen += 1
            if seen == TOKENS:
                rank_of(ranked, 1).kill()
            return False

        assert answer(masked, tokens=12, stopping_criteria=[kill]) == wanted
    assert seen == 12


def test_a_signal_drains_all_ranks(ranked: ServerProcess) -> None:
    """The last of this server's tests."""
    processes = [rank_of(ranked, number) for number in range(2)]
    assert ranked.terminate(60) == 0
    gone, alive = psutil.wait_procs(processes, timeout=30)
    assert len(gone) == 2, alive


@pytest.mark.slow
def test_ranks_do_not_outlive_what_started_them(bundle: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        (server,) = start(stack, bundle, tmp_path, 2, 1)
        processes = [rank_of(server, number) for number in range(2)]
        os.kill(server._alive.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(processes, timeout=60)
    assert len(gone) == 2, alive
