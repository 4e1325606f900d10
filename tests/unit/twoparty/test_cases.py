"""Cases that broke other libraries, for profile two-party: what is sent, ends of domains, where a pass goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from layer_check import Whole, clear_inputs, errors, first_bad, main
from parties import Run, signed, uniform
from safetensors.numpy import load_file
from scipy.stats import chisquare

from sordino.client.twoparty.linear import WordKey
from sordino.client.twoparty.session import check_rows
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import PartySession, StreamLink, TwoPartyModel, _layer
from sordino.shared.errors import (
    LimitError,
    ProtocolError,
    RangeError,
    SessionLostError,
    TransportError,
    UnsupportedModelError,
)
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.dealt import Dealt
from sordino.shared.twoparty.forward import Model, inverse_norm
from sordino.shared.twoparty.numbers import growth
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.source import Dealer
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare
from sordino.shared.twoparty.tokens import Head

Array = np.ndarray[Any, Any]
CHANCE = 1e-7
SECRET = 0x0123456789ABCDE
RUNS = 10_000


def bytes_of(messages: list[bytes]) -> Array:
    return np.frombuffer(b"".join(messages), np.uint8)


# -- 5.5: a share that is sent without a fresh mask --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trunc", "square", "product"])
def test_shares_that_are_sent_are_uniform_and_say_nothing(name: str) -> None:
    """One secret 10,000 times: every byte of what either party sends is uniform; and with secrets that differ, nothing
    that is sent goes with them."""
    step: Any = {
        "trunc": Trunc(RUNS, 20),
        "square": TruncSquare(RUNS, 1, 30),
        "product": TruncMul(RUNS, 1, 20, 20),
    }[name]
    shape = (RUNS,) if name == "trunc" else (RUNS, 1)
    factor = [np.full(RUNS, SECRET)] if name == "product" else []
    same = Run([step], step.run, np.full(shape, SECRET), *factor)
    secrets = uniform(RUNS, 50).reshape(shape)
    other = Run([step], step.run, secrets, *factor)
    for link in same.links:
        for place in bytes_of(link.sent).reshape(-1, 8).T:
            assert chisquare(np.bincount(place, minlength=256)).pvalue > CHANCE
    for link in other.links:
        sent = np.frombuffer(b"".join(link.sent), np.int64)[:RUNS]
        assert abs(np.corrcoef(sent.astype(np.float64), secrets.ravel().astype(np.float64))[0, 1]) < 6 / RUNS**0.5


def test_products_of_shares_that_are_all_one() -> None:
    """x * y * y, y of shares 1 and 1: what is sent for the second product is as uniform as for the first."""
    step = TruncMul(RUNS, 1, 1, 1)

    def program(party: Party, x: Array) -> Array:
        y = np.full(RUNS, 4, np.uint64)  # shares 4 + 4 stand for 8, truncated 4
        once = step.run(party, x, y)
        return step.run(party, once << np.uint64(1), y)

    run = Run([step, step], program, np.full((RUNS, 1), 1 << 20))
    assert np.abs(signed(run.result) - (1 << 19) * 16).max() <= 64
    for link in run.links:
        for message in link.sent:
            for place in bytes_of([message]).reshape(-1, 8).T:
                assert chisquare(np.bincount(place, minlength=256)).pvalue > CHANCE


# -- 5.6: what is insecure is no default -------------------------------------------------------------------------------


def test_a_dealer_without_tls_is_refused_unless_on_loopback() -> None:
    with pytest.raises(TransportError, match=r"grpcs://|loopback|TLS"):
        Dealer("grpc://dealer.example:50552", None, "token")


# -- a client that goes on without waiting -----------------------------------------------------------------------------


def test_words_that_a_pass_has_not_come_to_are_few() -> None:
    """A server keeps no more of them in memory; the end of the client always gets through."""
    with asyncio.Runner() as runner:
        link = StreamLink(runner.get_loop(), lambda words: None, 60.0)
        for _ in range(8):
            link.put(bytes(8))
        with pytest.raises(LimitError, match="wait for its answers"):
            link.put(bytes(8))
        link.put(None)
        assert [link.receive() for _ in range(8)] == [bytes(8)] * 8
        with pytest.raises(SessionLostError, match="client is gone"):
            link.receive()


# -- 5.7: at the ends of a domain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 20, 61])
def test_truncation_at_its_limit(k: int) -> None:
    """2^62 - 1 and -2^62 are right, each time. From 2^62 on the scale budget keeps wires out: see test_steps."""
    limits = np.array([(1 << 62) - 1, (1 << 62) - 2, -(1 << 62), -(1 << 62) + 1])
    x = np.repeat(limits, RUNS // 4)
    step = Trunc(len(x), k)
    over = signed(Run([step], step.run, x).result) - (x >> np.int64(k))
    assert set(np.unique(over)) <= {0, 1}


@pytest.mark.parametrize(("of_limit", "told"), [(0.5, False), (0.97, False), (1.05, True), (1.5, True), (100.0, True)])
def test_rows_at_the_end_of_the_domain(model: TwoPartyModel, bundle: Path, of_limit: float, told: bool) -> None:
    """Sums of squares to 2^33: below, right; a sixteenth and more above, told. In between is a cell that straddles."""
    d = model.plan.shape.d
    rows = np.full((1, d), (2.0**33 * of_limit / d) ** 0.5)
    hidden, outside, _ = Whole(model, bundle)(rows)
    assert bool(outside) == told
    if not told:
        # The layers add little to so much.
        norm = load_file(bundle / CLIENT_DIR / "client.safetensors")["model.norm.weight"]
        assert np.abs(hidden - norm).max() < 0.05 * np.abs(norm).max()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_no_row_grows_by_more_than_its_bound(model: TwoPartyModel, gated: bool, biased: bool) -> None:
    """Against rows of norm sqrt(d) and heads' outputs that are sought out to grow it most: never over, and near it."""
    rng, kind = np.random.default_rng(7), "llama" if gated else "gpt2"
    shape = replace(model.plan.shape, family=kind, d=12, heads=4, groups=2 if gated else 4, head=3, inner=16)
    rows = (2 if gated else 1) * shape.inner
    values, out = rng.normal(size=(shape.groups * shape.head, shape.d)), rng.normal(size=(shape.d, 12))
    gate_up, down = rng.normal(size=(rows, shape.d)), rng.normal(size=(shape.d, shape.inner))
    gate_up[3] *= 40  # as one neuron of massive activations
    biases = [rng.normal(size=size) * biased for size in (len(values), rows, shape.d, shape.d)]
    by_attention, by_mlp = growth(shape, values, out, gate_up, down, (biases[0], biases[1]), (biases[2], biases[3]))

    def mlp(x: Array) -> Array:
        both = x @ gate_up.T + biases[1]
        gate = both[:, : shape.inner] / (1 + np.exp(-np.clip(both[:, : shape.inner], -50, 50)))
        return (gate * both[:, shape.inner :] if gated else gate) @ down.T + biases[3]

    def attention(x: Array) -> Array:  # every head looks at the row that is largest to it
        heads = np.repeat((x @ values.T + biases[0]).reshape(len(x), shape.groups, -1), 4 // shape.groups, axis=1)
        return heads.reshape(len(x), -1) @ out.T + biases[2]

    for adds, bound, near in ((mlp, by_mlp, 0.3), (attention, by_attention, 0.3)):
        x, largest = rng.normal(size=(2000, shape.d)), 0.0
        for step in (1.0, 0.3, 0.1, 0.03):
            for _ in range(8):
                x *= np.sqrt(shape.d) / np.linalg.norm(x, axis=1, keepdims=True)
                norms = np.linalg.norm(adds(x), axis=1)
                largest = max(largest, norms.max())
                best = x[np.argsort(norms)[-40:]]
                x = np.concatenate([best, np.repeat(best, 49, axis=0) + step * rng.normal(size=(1960, shape.d))])
        assert near * bound < largest <= bound


def test_layers_of_which_nothing_is_proven_are_named(bundle: Path, model: TwoPartyModel) -> None:
    """One whose output is scaled up as far as it takes; what is added then does carry a row past the check."""
    assert model.unproven == []
    store = MatrixStore(bundle, "cpu")
    shape, tensors = model.plan.shape, load_file(bundle / CLIENT_DIR / "client.safetensors")
    weights = [model.matrix(1, number).weights.numpy() for number in range(4)]
    assert store.manifest.fingerprint == model.fingerprint
    _, _, grows = _layer(shape, tensors, "model.layers.1.", weights)
    name = "model.layers.1.mlp.down_proj.scale"
    scaled = tensors | {name: tensors[name] * np.float32(1.01 * nb.MOST_GROWTH / grows)}
    assert _layer(shape, scaled, "model.layers.1.", weights)[2] > nb.MOST_GROWTH > grows


# -- norms of any magnitude --------------------------------------------------------------------------------------------

Tensors = dict[str, Any]


def turned_over(tensors: Tensors, kind: nb.Family, prefix: str, by: float) -> Tensors:
    """The same layer: weights of its norms times ``by``, and the matrices after them over it."""
    out = dict(tensors)
    for norm, modules in zip(kind.norms, (kind.modules[0], kind.modules[2]), strict=True):
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if prefix + name in out:
                out[prefix + name] = (out[prefix + name] * by).astype(np.float32)
        for name in modules:
            out[f"{prefix}{name}.scale"] = (out[f"{prefix}{name}.scale"] / by).astype(np.float32)
    return out


@pytest.mark.parametrize("by", [2.0**-20, 2.0**-12, 2.0**6])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_the_same_layer_has_the_same_integers(bundles: Callable[..., Path], family: str, by: float) -> None:
    """Whatever part of it its norms' weights are: the same integers and constants, and what is proven of it."""
    folder = bundles(family)
    model, tensors = TwoPartyModel(MatrixStore(folder, "cpu")), load_file(folder / CLIENT_DIR / "client.safetensors")
    shape = model.plan.shape
    prefix, weights = f"{shape.kind.prefix}1.", [model.matrix(1, number).weights.numpy() for number in range(4)]
    other = turned_over(tensors, shape.kind, prefix, by)
    same, found = model.public.layers[1], nb.Layer.of(shape, model.plan.sizes[1], other, 1)
    for name in ("norm1", "norm2"):
        assert np.array_equal(getattr(found, name).weights, getattr(same, name).weights)
        assert getattr(found, name).factor == by * getattr(same, name).factor
    for name in ("turned", "out", "gate", "up", "down", "heads", "head_norms"):
        assert np.array_equal(getattr(found, name), getattr(same, name))
    (limits, constants, grows), right = (_layer(shape, one, prefix, weights) for one in (other, tensors))
    assert (limits, grows) == (right[0], right[2])
    assert all(map(np.array_equal, constants, right[1]))


@pytest.mark.parametrize("by", [0.0005, 0.3, 60.0])
def test_a_norm_of_any_magnitude_is_that_of_float64(model: TwoPartyModel, bundle: Path, by: float) -> None:
    """All norms of a layer, and the last one, of which what is opened has the magnitude too."""
    x, tensors = prompt(bundle), load_file(bundle / CLIENT_DIR / "client.safetensors")
    plain, outside, _ = Whole(model, bundle)(x)
    for layer in range(model.plan.shape.layers):
        tensors = turned_over(tensors, model.plan.shape.kind, f"model.layers.{layer}.", by)
    tensors["model.norm.weight"] *= np.float32(by)
    hidden, more, found = Whole(model, bundle, Model.of(model.plan, tensors))(x)
    assert outside == more == 0
    assert first_bad(found, clear_inputs(model, tensors, x), 0.02) is None
    assert np.abs(hidden / by - plain).max() < 0.02 * np.abs(plain).max()


@pytest.mark.parametrize("size", [1e-30, 1e-4, 0.04, 1.0, 1000.0, 1e30])
def test_weights_of_norms_have_their_bits(size: float) -> None:
    """Of all magnitudes, and where some are much larger than others."""
    rng = np.random.default_rng(3)
    for spread in (0.0, 0.3, 3.0):
        weights = (size * np.exp(spread * rng.normal(size=576))).astype(np.float32)
        norm, weights = nb.Norm.of({"norm.weight": weights}, "norm"), weights.astype(np.float64)
        assert np.linalg.norm(norm.real - weights) < 2.0**-nb.NORM * np.linalg.norm(weights)
        assert 0.999 < np.sqrt(np.square(norm.real / norm.factor).mean()) < 2.001
    with pytest.raises(UnsupportedModelError, match="finite"):
        nb.Norm.of({"norm.weight": np.full(8, np.nan, np.float32)}, "norm")


def test_a_norm_whose_weights_are_all_0_gives_nothing(model: TwoPartyModel, bundle: Path) -> None:
    x, tensors, prefix = prompt(bundle), load_file(bundle / CLIENT_DIR / "client.safetensors"), "model.layers.0."
    for name in nb.FAMILIES["llama"].norms:
        tensors[f"{prefix}{name}.weight"] *= np.float32(0)
    limits, _, grows = _layer(
        model.plan.shape, tensors, prefix, [model.matrix(0, number).weights.numpy() for number in range(4)]
    )
    other = copy(model)
    other.plan = replace(model.plan, sizes=(nb.Sizes.of(prefix, limits), *model.plan.sizes[1:]))
    other.plan.check()
    assert grows == 0
    _, outside, found = Whole(other, bundle, Model.of(other.plan, tensors))(x)
    assert outside == 0
    right = clear_inputs(model, tensors, x)
    assert first_bad(*({place: one[place] for place in right if place[0]} for one in (found, right)), 0.02) is None


def test_norms_of_heads_go_by_their_magnitude(bundles: Callable[..., Path]) -> None:
    """Weights keep their integers, what queries or keys are turned by has the magnitude, and the bound of keys too."""
    folder = bundles("qwen3")
    model, tensors = TwoPartyModel(MatrixStore(folder, "cpu")), load_file(folder / CLIENT_DIR / "client.safetensors")
    shape, same, name = model.plan.shape, model.public.layers[0], "model.layers.0.self_attn.k_norm.weight"
    queries, both = shape.heads * shape.head, (shape.heads + shape.groups) * shape.head
    other = tensors | {name: tensors[name] / np.float32(256)}
    found = nb.Layer.of(shape, model.plan.sizes[0], other, 0)
    assert np.array_equal(found.head_norms, same.head_norms)
    assert np.array_equal(found.turned[queries:both], same.turned[queries:both] / 256)
    assert np.array_equal(found.turned[:queries], same.turned[:queries])
    weights = [model.matrix(0, number).weights.numpy() for number in range(4)]
    limits, _, _ = _layer(shape, tensors | {name: tensors[name] * np.float32(2.0**10)}, "model.layers.0.", weights)
    with pytest.raises(RangeError, match="queries or keys"):
        nb.Sizes.of("layer 0", limits)


def test_logits_of_a_small_last_norm_are_chosen_among_as_of_a_large_one(bundle: Path, model: TwoPartyModel) -> None:
    tensors, shape = load_file(bundle / CLIENT_DIR / "client.safetensors"), model.plan.shape
    tensors["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    by = np.float32(2.0**-12)
    other = tensors | {name: tensors[name] * f for name, f in (("model.norm.weight", by), ("lm_head.weight", 1 / by))}
    assert nb.Choice.of(shape, other) == nb.Choice.of(shape, tensors)
    assert np.array_equal(Head.of(shape, other).weights, Head.of(shape, tensors).weights)


def test_biases_that_do_not_fit_are_refused(bundles: Callable[..., Path]) -> None:
    """Where a norm's weights are so small beside a bias that its scale has no bits left."""
    folder = bundles("qwen2")
    model, tensors = TwoPartyModel(MatrixStore(folder, "cpu")), load_file(folder / CLIENT_DIR / "client.safetensors")
    name, weights = "model.layers.0.self_attn.k_proj.bias", [model.matrix(0, i).weights.numpy() for i in range(4)]
    with pytest.raises(RangeError, match=r"layers\.0\.: biases do not fit"):
        _layer(model.plan.shape, tensors | {name: tensors[name] + np.float32(1e7)}, "model.layers.0.", weights)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eps", "theta", "gate_cell"])
@pytest.mark.parametrize("value", ["0.001", True, None, [1.0], "NaN"])
def test_a_plan_of_other_types_is_malformed(model: TwoPartyModel, name: str, value: object) -> None:
    body = json.loads(model.plan.to_json())
    (body["sizes"][0] if name == "gate_cell" else body["shape"])[name] = float("nan") if value == "NaN" else value
    assert nb.Plan.from_json(model.plan.to_json()) == model.plan
    with pytest.raises(ProtocolError, match="malformed"):
        nb.Plan.from_json(json.dumps(body).encode())


def test_a_plan_of_another_release_is_refused(model: TwoPartyModel) -> None:
    """By client and dealer: shares would add up to noise."""
    body = json.loads(model.plan.to_json())
    body["protocol"] += 1
    with pytest.raises(ProtocolError, match="another release"):
        nb.Plan.from_json(json.dumps(body).encode())


@pytest.mark.parametrize("raw", [b"", b"[1]", b"null", b"1", b'"x"', b"{}", b"[" * 100_000, b"\xff"])
def test_a_plan_that_is_none_is_malformed(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        nb.Plan.from_json(raw)


def test_products_ahead_are_bounded_by_what_the_server_keeps(model: TwoPartyModel) -> None:
    large = copy(model)
    smollm = replace(model.plan.shape, layers=30, d=576, heads=9, groups=3, head=64, inner=1536)
    large.plan = replace(model.plan, shape=smollm)
    assert large.most_ahead == (512 << 20) // (30 * 8 * (960 + 576 + 3072 + 576))
    session = PartySession(large, cast(Dealt, None), WordKey(parallel=False).public)
    with pytest.raises(LimitError, match=f"--ahead {large.most_ahead} at most"):
        next(session.products(pb.WordProducts(layer=0, matrix=0, rows=large.most_ahead + 1)))
    large.plan = replace(model.plan, shape=replace(smollm, layers=80, d=8192, inner=28672, heads=64, head=128))
    assert large.most_ahead == 160
    assert model.most_ahead == 4096


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**15, 1e300])
def test_what_cannot_be_a_row_is_refused(value: float) -> None:
    rows = np.zeros((2, 8))
    check_rows(rows)
    rows[1, 3] = value
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(rows)


def test_a_row_whose_squares_wrap_is_refused_at_the_door() -> None:
    """A norm would take the rest of its sum of squares mod 2^64 for a small one, and give a number like any other."""
    d = 64
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, d))
    rows = signs * ((2.0**38 + 2.0**32.9) / d) ** 0.5
    square, root = TruncSquare(1, d, nb.SUM), inverse_norm(1, d, 1e-5)

    def norm(party: Party, x: Array) -> Array:
        return root.run(party, square.run(party, x)[1])[1]

    words = np.rint(rows * 2.0 ** (nb.RESIDUAL + nb.SUM)).astype(np.int64)
    assert Run([square, root], norm, words).result.tolist() == [1], "the norm itself cannot tell it"
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(rows)
    wide = np.full((1, 9 * d), abs(rows[0, 0]) / 3)  # no entry of which is large
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(wide)
    check_rows(wide * 0.9)


# -- 5.4 and 5.9: what a pass shows, and where it is wrong -------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


@pytest.fixture(scope="module")
def model(bundle: Path) -> TwoPartyModel:
    return TwoPartyModel(MatrixStore(bundle, "cpu"))


def prompt(bundle: Path) -> Array:
    return load_file(bundle / CLIENT_DIR / "client.safetensors")["model.embed_tokens.weight"][40:46].astype(np.float64)


def test_each_layer_is_that_of_float64(model: TwoPartyModel, bundle: Path) -> None:
    """Case 5.9. An error is named where it begins, not seen at the end alone."""
    x = prompt(bundle)
    whole = Whole(model, bundle)
    right = clear_inputs(model, whole.tensors, x)
    _, outside, found = whole(x)
    assert outside == 0
    assert len(found) == len(right) == 4 * model.plan.shape.layers
    worst = max(errors(found, right).values())
    print(f"largest error of an input of a matrix: {worst:.2g} of its largest entry")
    assert first_bad(found, right, 0.02) is None
    layers = list(model.public.layers)
    norm = layers[1].norm2
    layers[1] = replace(layers[1], norm2=replace(norm, weights=norm.weights + np.uint64(1 << (nb.NORM - 2))))
    _, _, found = Whole(model, bundle, replace(model.public, layers=tuple(layers)))(x)
    assert first_bad(found, right, 0.02) == "layer 1, the MLP's input"


def test_the_command_names_the_first_layer_that_is_off(
    bundles: Callable[..., Path], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--bundle", str(bundle)])
    out = capsys.readouterr().out
    assert "0 wires left the domain" in out
    assert out.splitlines()[-1] == "every layer is within 0.02"
    with pytest.raises(SystemExit, match="is layer 0, attention's input"):
        main(["--bundle", str(bundle), "--tolerance", "0"])
    assert "within" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="of Llamas alone"):
        main(["--bundle", str(bundles("gpt2"))])


def test_rows_of_a_prompt_are_in_no_message(model: TwoPartyModel, bundle: Path) -> None:
    """Case 5.4. Nothing is opened beside masked wires: as many messages as rounds and products, whatever the prompt is,
    and the canary's entries are in none of them."""
    canary = np.full((3, model.plan.shape.d), 1234.5) + np.arange(model.plan.shape.d)
    sizes = []
    for x in (prompt(bundle)[:3], canary):
        whole = Whole(model, bundle)
        whole(x)
        sizes.append([[len(message) for message in link.sent] for link in whole.links])
        assert len(whole.links[0].sent) == (17 + 4) * model.plan.shape.layers + 3
        assert len(whole.links[1].sent) == 17 * model.plan.shape.layers + 3
        secret = np.rint(x * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64).ravel()
        secret = np.concatenate([secret, secret << np.uint64(nb.SUM), -secret])
        sent = np.concatenate(
            [np.frombuffer(m, np.uint64) for link in whole.links for m in link.sent if not len(m) % 8]
        )
        assert not np.isin(secret[secret != 0], sent).any()
    assert sizes[0] == sizes[1]
