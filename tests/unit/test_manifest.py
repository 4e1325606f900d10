"""The manifest: what is written is what is read, and whatever bytes come in, the only error is BundleError."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sordino.shared.errors import BundleError
from sordino.shared.manifest import (
    MANIFEST_NAME,
    MAX_FEATURES,
    MAX_MANIFEST_BYTES,
    FileSpec,
    GroupSpec,
    MemberSpec,
    ModelManifest,
    sha256_file,
)
from sordino.shared.ring import P_HALF, P, activation_bound

SHA = hashlib.sha256(b"").hexdigest()


def make(weight_bits: Any = 8) -> ModelManifest:
    def group(index: int, name: str, members: tuple[tuple[str, int], ...]) -> GroupSpec:
        return GroupSpec(
            name=f"layers.{index}.{name}",
            layer=index,
            in_features=64,
            members=tuple(MemberSpec(name=f"layers.{index}.{m}", out_features=size) for m, size in members),
            weight_bits=weight_bits,
            l1_max=64 * 100,
            l2_max=800,
        )

    groups = tuple(
        g for i in range(2) for g in (group(i, "qkv", (("q", 64), ("k", 32), ("v", 32))), group(i, "o", (("o", 64),)))
    )
    return ModelManifest(
        model_name="tiny",
        model_type="llama",
        weight_bits=weight_bits,
        groups=groups,
        client_files={"config.json": FileSpec(size=10, sha256=SHA)},
        server_files={"layers-0.safetensors": FileSpec(size=0, sha256=SHA)},
    )


def sealed(body: dict[str, Any]) -> bytes:
    """``body`` with the fingerprint that its content has: what a hostile provider sends, so no check is skipped."""
    body.pop("fingerprint", None)
    plain = json.loads(json.dumps(body))
    for group in plain["groups"] if isinstance(plain.get("groups"), list) else []:
        if isinstance(group, dict):
            group.pop("x_max", None)
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**body, "fingerprint": digest}).encode()


def body_of(manifest: ModelManifest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(manifest.to_json())
    return body


@pytest.mark.parametrize("weight_bits", [8, 12])
def test_round_trip(weight_bits: int) -> None:
    manifest = make(weight_bits)
    again = ModelManifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    assert again.to_json() == manifest.to_json()
    assert again.by_name["layers.1.qkv"].out_features == 128


names = st.from_regex(r"[A-Za-z0-9_.+\-]{1,40}", fullmatch=True)


@st.composite
def manifests(draw: st.DrawFn) -> ModelManifest:
    weight_bits = draw(st.sampled_from([8, 12]))
    count = draw(st.integers(1, 5))
    group_names = draw(st.lists(names, min_size=count, max_size=count, unique=True))
    member_names = draw(st.lists(names, min_size=count, max_size=3 * count, unique=True))
    groups = []
    for i, name in enumerate(group_names):
        members = tuple(
            MemberSpec(name=m, out_features=draw(st.integers(1, MAX_FEATURES))) for m in member_names[i::count]
        )
        groups.append(
            GroupSpec(
                name=name,
                layer=draw(st.integers(0, 1000)),
                in_features=draw(st.integers(1, 1 << 17)),
                members=members,
                weight_bits=weight_bits,  # type: ignore[arg-type]
                l1_max=draw(st.integers(0, P_HALF)),
                l2_max=draw(st.integers(0, 1 << 32)),
            )
        )
    files = draw(
        st.dictionaries(
            st.from_regex(r"[A-Za-z0-9_\-]{1,20}(\.[a-z]{1,5})?", fullmatch=True),
            st.builds(FileSpec, size=st.integers(0, 1 << 40), sha256=st.just(SHA)),
            max_size=3,
        )
    )
    return ModelManifest(
        model_name=draw(st.text(min_size=1, max_size=20)),
        model_type="llama",
        weight_bits=weight_bits,  # type: ignore[arg-type]
        groups=tuple(groups),
        client_files=files,
        server_files=files,
    )


@given(manifests())
@settings(max_examples=60)
def test_round_trip_of_any_manifest(manifest: ModelManifest) -> None:
    assert ModelManifest.from_json(manifest.to_json()) == manifest


def test_fingerprint_names_the_content() -> None:
    manifest = make()
    raw = json.dumps(json.loads(manifest.to_json()), indent=7).encode()
    assert ModelManifest.from_json(raw).fingerprint == manifest.fingerprint  # white space is not content
    changed = dataclasses.replace(manifest, model_name="other")
    assert changed.fingerprint != manifest.fingerprint


def test_any_changed_field_breaks_the_fingerprint() -> None:
    raw = make().to_json()
    for old, new in ((b"tiny", b"tinz"), (b'"l1_max": 6400', b'"l1_max": 6401'), (b'"size": 10', b'"size": 11')):
        assert old in raw
        with pytest.raises(BundleError):
            ModelManifest.from_json(raw.replace(old, new, 1))


def test_stated_x_max_is_ignored() -> None:
    """The bound is the client's own: a manifest that claims another one changes nothing."""
    body = body_of(make())
    for group in body["groups"]:
        group["x_max"] = 2**31
    assert ModelManifest.from_json(json.dumps(body).encode()).groups[0].x_max == P_HALF // (64 * 127)


def test_sealed_helper_makes_what_the_manifest_accepts() -> None:
    """Otherwise every malformed case below would be refused for its fingerprint alone."""
    manifest = make()
    assert ModelManifest.from_json(sealed(body_of(manifest))) == manifest


MISSING = object()
JUNK: list[Any] = [
    MISSING, None, True, -1, 0.5, 8.0, 1e300, 2**63, 2**200, "", "x", "a/b", "..", "../x", "/x", "a\n", "a\x00",
    "\ud800", [], [[]], {}, {"x": 1}, [None], float("nan"), float("inf"),
]  # fmt: skip
FIELDS: list[tuple[Any, ...]] = [
    ("model_name",), ("model_type",), ("weight_bits",), ("modulus",), ("format_version",), ("groups",),
    ("client_files",), ("server_files",), ("groups", 0), ("groups", 0, "name"), ("groups", 0, "layer"),
    ("groups", 0, "in_features"), ("groups", 0, "members"), ("groups", 0, "members", 1),
    ("groups", 0, "members", 1, "name"),
    ("groups", 0, "members", 1, "out_features"), ("groups", 0, "weight_bits"), ("groups", 0, "l1_max"),
    ("groups", 0, "l2_max"), ("client_files", "config.json"), ("client_files", "config.json", "size"),
    ("client_files", "config.json", "sha256"),
]  # fmt: skip
# Values that are right, or right for some field.
HARMLESS: dict[str, list[Any]] = {
    "model_name": ["x", "a/b", "..", "../x", "/x", "a\n", "a\x00", "\ud800"],
    "model_type": ["x", "a/b", "..", "../x", "/x", "a\n", "a\x00", "\ud800"],
    "client_files": [{}],
    "server_files": [{}],
    "name": ["x", ".."],
    "format_version": [MISSING],
    "modulus": [MISSING],
}


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
def test_every_field_refuses_junk(path: tuple[Any, ...]) -> None:
    for junk in JUNK:
        body = body_of(make())
        place: Any = body
        for step in path[:-1]:
            place = place[step]
        if junk is MISSING:
            del place[path[-1]]
            if isinstance(place, list) or path[-1] == "config.json":
                continue  # one group, member or file fewer is another manifest, not a malformed one
        else:
            place[path[-1]] = junk
        if any(
            junk is harmless or (junk == harmless and type(junk) is type(harmless))
            for harmless in HARMLESS.get(path[-1], [])
        ):
            continue
        with pytest.raises(BundleError):
            ModelManifest.from_json(sealed(body))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../config.json",
        "a/b",
        "/etc/passwd",
        "a\\b",
        "config.json\n",
        "a\x00b",
        ".hidden",
        "a..b",
        "x" * 300,
    ],
)
def test_a_file_name_is_a_plain_name(name: str) -> None:
    body = body_of(make())
    body["client_files"] = {name: {"size": 1, "sha256": SHA}}
    with pytest.raises(BundleError):
        ModelManifest.from_json(sealed(body))


def test_unknown_fields_and_duplicates_are_refused() -> None:
    body = body_of(make())
    with pytest.raises(BundleError):
        ModelManifest.from_json(sealed({**body, "auto_map": {"AutoModel": "evil.py"}}))
    body["groups"].append(body["groups"][0])
    with pytest.raises(BundleError, match="twice"):
        ModelManifest.from_json(sealed(body))
    body = body_of(make())
    body["groups"][1]["members"] = body["groups"][0]["members"]
    with pytest.raises(BundleError, match="twice"):
        ModelManifest.from_json(sealed(body))


def test_group_with_other_weight_bits_is_refused() -> None:
    body = body_of(make())
    body["groups"][2]["weight_bits"] = 12
    with pytest.raises(BundleError, match="weight_bits"):
        ModelManifest.from_json(sealed(body))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def parse(raw: bytes) -> None:
    """Passes when the bytes are accepted or refused; any other exception is the failure looked for."""
    try:
        ModelManifest.from_json(raw)
    except BundleError:
        return


@given(st.binary(max_size=300))
@example(b"")
@example(b"null")
@example(b"[]")
@example(b'"x"')
@example(b"{}")
@example(b"\xff\xfe{\x00")
@example(b'{"fingerprint": 1}')
@example(b'{"fingerprint": 1, "groups": {}}')
def test_fuzz_bytes(raw: bytes) -> None:
    with pytest.raises(BundleError):
        ModelManifest.from_json(raw)


@given(json_values)
def test_fuzz_json(value: Any) -> None:
    with pytest.raises(BundleError):
        ModelManifest.from_json(json.dumps(value).encode())


@given(st.sampled_from(FIELDS), json_values)
@settings(max_examples=300)
def test_fuzz_one_field(path: tuple[Any, ...], value: Any) -> None:
    body = body_of(make())
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    parse(sealed(body))


@given(st.data())
@settings(max_examples=200)
def test_fuzz_damage(data: st.DataObject) -> None:
    """Cut anywhere, or a byte changed anywhere: refused, or (white space, the ignored x_max) the same manifest."""
    manifest = make()
    raw = bytearray(manifest.to_json())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = ModelManifest.from_json(bytes(raw))
    except BundleError:
        return
    assert again == manifest


BOMBS = {
    "too long": b" " * (MAX_MANIFEST_BYTES + 1),
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "digits": b'{"fingerprint": ' + b"9" * 1_000_000 + b"}",
    "one huge string": b'{"fingerprint": "' + b"a" * (8 << 20) + b'"}',
    "many names": b"{" + b",".join(b'"%d": 0' % i for i in range(500_000)) + b"}",
}


@pytest.mark.parametrize("raw", BOMBS.values(), ids=BOMBS.keys())
def test_size_bombs(raw: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(BundleError) as caught:
        ModelManifest.from_json(raw)
    assert time.monotonic() - start < 10
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("field", ["in_features", "l1_max", "l2_max", "out_features"])
def test_declared_sizes_allocate_nothing(field: str) -> None:
    """Case 1.8: a manifest of a few kB declares a matrix of 2^60; it is refused before allocation."""
    body = body_of(make())
    place = body["groups"][0]["members"][0] if field == "out_features" else body["groups"][0]
    place[field] = 1 << 60
    raw = sealed(body)
    tracemalloc.start()
    try:
        with pytest.raises(BundleError):
            ModelManifest.from_json(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("path", [("format_version",), ("modulus",), ("weight_bits",), ("groups", 0, "name")])
def test_errors_stay_short(path: tuple[Any, ...]) -> None:
    """An error may be logged: a value of a hostile manifest must not fill the log."""
    body = body_of(make())
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "A" * 100_000
    with pytest.raises(BundleError) as caught:
        ModelManifest.from_json(sealed(body))
    assert len(str(caught.value)) < 2000


def test_load(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        ModelManifest.load(tmp_path)
    manifest = make()
    (tmp_path / MANIFEST_NAME).write_bytes(manifest.to_json())
    assert ModelManifest.load(tmp_path) == manifest


def test_load_refuses_a_huge_file_unread(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(1 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(BundleError):
            ModelManifest.load(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MAX_MANIFEST_BYTES


def test_sha256_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc" * 1_000_000)
    assert sha256_file(path) == FileSpec(size=3_000_000, sha256=hashlib.sha256(b"abc" * 1_000_000).hexdigest())


@given(st.integers(1, 1 << 17), st.integers(0, P_HALF))
def test_no_product_can_wrap(in_features: int, l1_max: int) -> None:
    """§4.1: for int8 whatever the manifest claims; for 12 bits if the stated l1_max is true."""
    assert activation_bound(in_features, 8, l1_max) * in_features * 127 <= P_HALF < P // 2 + 1
    assert activation_bound(in_features, 12, l1_max) * max(l1_max, 1) <= P_HALF
