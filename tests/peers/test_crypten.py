"""CrypTen as a baseline: the stream and its count, the layer in the clear, and three processes from end to end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peers.crypten.block import SMOLLM2, draw_layer, load_layer, main, make_case
from peers.crypten.channel import Count, Link, Listener, connected
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from sordino.shared.errors import SordinoError, TransportError
from sordino.shared.tls import make_certificates

pytestmark = pytest.mark.peers
SCRIPT = Path(__file__).parents[2] / "bench" / "peers" / "crypten" / "block.py"
CONTEXT = 8
# Measured on this layer, of outputs up to 8.4: 0.018 to 0.033. CrypTen's formulas for exp, sigmoid and 1/sqrt alone,
# evaluated in float64, are off by 0.025; the rest are truncations.
ERROR = 0.08


@pytest.fixture
def ends(tmp_path: Path) -> Callable[..., None]:
    """Runs ``serving(link)`` in a thread and ``calling(link)`` here, on the two ends of a stream over TLS."""

    def run(serving: Callable[[Link], object], calling: Callable[[Link], object]) -> None:
        files = make_certificates(tmp_path, ["localhost"])

        def serve() -> None:
            with listener:
                serving(listener.accept())

        listener = Listener(files)
        thread = threading.Thread(target=serve)
        thread.start()
        with connected(listener.port, files.ca) as link:
            calling(link)
        thread.join(60)
        assert not thread.is_alive()

    return run


# -- the stream --------------------------------------------------------------------------------------------------------


def test_both_ends_count_the_same(ends: Callable[..., None]) -> None:
    """Two exchanges, the first of two messages and of more than gRPC's usual 4 MB, then one that nobody waits for."""
    large = bytes(9_000_000)
    counts: dict[str, Count] = {}

    def serving(link: Link) -> None:
        link.send(b"abc")
        assert [link.receive(), link.receive()] == [large, b"x"]
        link.send(b"de")
        assert link.receive() == b""
        assert link.receive() == b"last"
        counts["server"] = link.count

    def calling(link: Link) -> None:
        link.send(large)
        link.send(b"x")
        assert link.receive() == b"abc"
        link.send(b"")
        assert link.receive() == b"de"
        link.send(b"last")
        counts["client"] = link.count

    ends(serving, calling)
    assert counts["client"] == Count(rounds=2, bytes_up=9_000_005, bytes_down=5)
    assert counts["server"] == Count(rounds=2, bytes_up=5, bytes_down=9_000_005)


def test_a_message_that_only_comes_is_no_round(ends: Callable[..., None]) -> None:
    def calling(link: Link) -> None:
        assert [link.receive(), link.receive()] == [b"a", b"b"]
        assert link.count == Count(rounds=0, bytes_up=0, bytes_down=2)

    ends(lambda link: [link.send(b"a"), link.send(b"b")], calling)


def test_a_closed_stream_is_an_error(ends: Callable[..., None]) -> None:
    def calling(link: Link) -> None:
        with pytest.raises(TransportError, match="closed the stream"):
            link.receive()

    ends(lambda link: link.close(), calling)


# -- the layer in the clear --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


def test_the_reference_is_that_of_transformers(bundle: Path) -> None:
    """The layer's matrices put into the model the bundle was made of; its rotary tables are float32."""
    layer, rows = load_layer(bundle, CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(bundle.parent / "model", dtype=torch.float64)
    first = model.model.layers[0]
    linears = [
        [first.self_attn.q_proj, first.self_attn.k_proj, first.self_attn.v_proj],
        [first.self_attn.o_proj],
        [first.mlp.gate_proj, first.mlp.up_proj],
        [first.mlp.down_proj],
    ]
    with safe_open(bundle / "client" / "client.safetensors", "pt") as client:
        for group, matrix in zip(linears, layer.matrices, strict=True):
            for linear, part in zip(group, matrix.T.split([linear.out_features for linear in group]), strict=True):
                name = next(name for name, module in model.named_modules() if module is linear)
                half = client.get_tensor(f"{name}.scale").double()[:, None] / 2
                assert ((linear.weight - part).abs() <= 1.001 * half).all(), name
                linear.weight.data = part.contiguous()
    with torch.inference_mode():
        hidden = model(inputs_embeds=rows[None], output_hidden_states=True).hidden_states[1]
    assert (make_case(layer, rows).expected - hidden[0, -1]).abs().max() < 1e-5


def test_other_models_are_refused(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match="another family"):
        load_layer(bundles("qwen2"), CONTEXT)
    with pytest.raises(SordinoError, match=r"config\.json"):
        load_layer(tmp_path, CONTEXT)


def test_random_weights_are_of_the_shape_of_smollm2() -> None:
    layer, rows = draw_layer(SMOLLM2, 3)
    assert [tuple(matrix.shape) for matrix in layer.matrices] == [(576, 960), (576, 576), (576, 3072), (1536, 576)]
    assert make_case(layer, rows).keys.shape == (3, 2, 64)


# -- on shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("crypten") is None, reason="make test-peers installs it")
def test_a_block_on_shares(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "crypten.json"
    options = ["--bundle", bundle, "--context", str(CONTEXT), "--repeats", "2", "--json", out]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["protocol"] == "crypten"
    assert len(result["ms"]) == 2
    assert result["ms_p50"] > 0
    # Two passes under other shares of the same values: small errors, and not the same ones.
    errors = result["max_errors"]
    assert max(errors) == result["max_error"] < ERROR
    assert 0 < min(errors) < max(errors)
    # Every matrix is opened under a mask, whole, by both parties: 64-bit words.
    layer, _ = load_layer(bundle, CONTEXT)
    words = sum(matrix.numel() for matrix in layer.matrices)
    assert result["bytes_up"] == result["bytes_down"] > 8 * words
    assert result["bytes"] == 2 * result["bytes_up"]
    assert result["rounds"] > 100
    # Party 0 is sent one word a product at least, party 1 its seed before all passes.
    assert result["dealer_bytes"] == result["dealer_bytes_client"] > 8 * sum(m.shape[1] for m in layer.matrices)
    assert result["dealer_bytes_server"] == 0


def test_a_bundle_that_is_none_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["block.py", "--bundle", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"\Aerror: .* is no bundle .*\Z"):
        main()
