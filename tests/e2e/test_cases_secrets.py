"""What leaves the client, and what it saves: searched for every secret it makes, and for the prompt."""

from __future__ import annotations

import base64
import copy
import os
import pickle
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stack import ServerProcess, answer, connect_to

from sordino.client import pool as pool_module
from sordino.client import poolwriter, prg, protocols, rlwe
from sordino.client.poolfile import CHUNK, BatchKeys
from sordino.client.provision import points_per_block
from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared import prg as shared_prg
from sordino.shared.errors import PoolError
from sordino.shared.rlwe import PARAMS, expand_uniform, intt, pack, unpack

# -- collecting secrets ------------------------------------------------------------------------------------------------


class Secrets:
    """Notes what must stay at home, at the moment it is made: keys, and numbers by kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: set[bytes] = set()
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.rlwe: list[rlwe.SecretKey] = []
        self.masks: dict[str, np.ndarray] = {}
        self._replace(monkeypatch, shared_prg.random_key, self._key)
        self._replace(monkeypatch, shared_prg.derive, self._key)
        self._replace(monkeypatch, prg.uniform_mod_p, lambda out, _, label, *__: self._uniform(label, out))
        self._method(monkeypatch, rlwe.SecretKey, "__init__", lambda key, *_: self._secret_key(key))
        self._method(
            monkeypatch, poolwriter.BatchWriter, "masks", lambda _, group, out: self.masks.update({group: out})
        )
        self._method(monkeypatch, poolwriter.BatchWriter, "write", lambda _, group, wr, out: self.note("W r", wr))
        self._method(monkeypatch, pool_module.MaskPool, "store_check", lambda _, vectors, out: self._checks(vectors))
        self._method(monkeypatch, protocols.MaskedProtocol, "apply", lambda _, group, x, out: self._rows(x, out))
        self._method(monkeypatch, protocols.ClearProtocol, "apply", lambda _, group, x, out: self._rows(x, out))

    def note(self, kind: str, array: np.ndarray) -> None:
        self.numbers.setdefault(kind, []).append(np.array(array))

    def _uniform(self, label: bytes, out: np.ndarray) -> None:
        self.note("v" if label == b"check vector" else "r", out)

    def _key(self, out: bytes, *_: object) -> None:
        self.keys.add(out)

    def _checks(self, vectors: dict[str, Any]) -> None:
        for check in vectors.values():
            self.note("v", check.v)
            self.note("c", check.c)

    def _rows(self, x: np.ndarray, out: np.ndarray) -> None:
        self.note("x", x.astype("<i4").view(np.uint32))
        self.note("x", (x.astype(np.int64) % (2**32 - 5)).astype(np.uint32))
        self.note("W x", (out.astype(np.int64) % (2**32 - 5)).astype(np.uint32))

    def _secret_key(self, key: rlwe.SecretKey) -> None:
        self.rlwe.append(key)
        self.note("s", key._s)
        coefficients = np.ascontiguousarray(key._s[:, :, None])
        intt(coefficients)
        self.note("s", coefficients)  # -1 is q - 1 here
        ternary = (coefficients[0, :, 0].astype(np.int64) + 1) % PARAMS.primes[0] - 1
        assert set(ternary.tolist()) == {-1, 0, 1}
        for kind in (np.int8, np.int32, np.int64):
            self.keys.add(ternary[:96].astype(kind).tobytes())

    @staticmethod
    def _replace(monkeypatch: pytest.MonkeyPatch, function: Any, see: Callable[..., None]) -> None:
        """In every module that has imported it."""

        def seen(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            see(out, *args)
            return out

        for module in [m for name, m in sys.modules.items() if name.startswith("sordino.")]:
            for name, value in list(vars(module).items()):
                if value is function:
                    monkeypatch.setattr(module, name, seen)

    @staticmethod
    def _method(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, see: Callable[..., None]) -> None:
        function = getattr(kind, name)

        def seen(self: Any, *args: Any) -> Any:
            out = function(self, *args)
            see(self, *args, out)
            return out

        monkeypatch.setattr(kind, name, seen)

    # -- searching -----------------------------------------------------------------------------------------------------

    def found(self, *streams: bytes) -> set[str]:
        """Kinds of secrets of which some eight bytes, or a whole key in one of its spellings, are in the streams."""
        seen = {"key" for key in self.keys for text in spellings(key) for stream in streams if text in stream}
        there = np.sort(np.concatenate([windows(stream) for stream in streams]))
        for kind, arrays in self.numbers.items():
            wanted = np.unique(np.concatenate([pairs(array) for array in arrays]))
            at = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
            if (there[at] == wanted).any():
                seen.add(kind)
        return seen


def spellings(key: bytes) -> list[bytes]:
    return [key, key.hex().encode(), base64.b64encode(key)[:-4], base64.urlsafe_b64encode(key)[:-4]]


def windows(stream: bytes) -> np.ndarray:
    """Eight bytes from every offset on."""
    parts = [np.frombuffer(stream, "<u8", (len(stream) - at) // 8, at) for at in range(8) if len(stream) >= at + 8]
    return np.concatenate([*parts, np.zeros(1, "<u8")])


def pairs(array: np.ndarray) -> np.ndarray:
    """Neighbours in a row as eight bytes, without those that ordinary files are full of."""
    flat = array.reshape(-1, array.shape[-1]).astype(np.uint64)
    both = (flat[:, :-1] | flat[:, 1:] << np.uint64(32)).reshape(-1)
    small = np.uint64(1 << 12)
    plain = (flat[:, :-1] < small) & (flat[:, 1:] < small)
    return both[~plain.reshape(-1)]


def uploads(proxy: RecordingProxy) -> list[bytes]:
    return [message.raw for message in proxy.messages(direction="up") if message.raw is not None]


def provision_requests(proxy: RecordingProxy) -> list[pb.ProvisionRequest]:
    raw = [message.raw for message in proxy.messages("Provision", "up") if message.raw is not None]
    return [pb.ProvisionRequest.FromString(message) for message in raw]


def saved(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def session_of(server: ServerProcess, proxy: RecordingProxy, tmp: Path, **options: Any) -> list[int]:
    connected = connect_to(server, tmp, target=proxy.target, ca=None, **options)
    with connected.session:
        return answer(connected, tokens=4)


# -- 1.5 and 1.10 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_no_secret_is_sent_or_saved(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """Cases 1.5 and 1.10: of keys, masks, products, check vectors, RLWE secrets and inputs, nothing is in what is sent.

    On disk, a plain pool (0600) holds check vectors and the key of masks that are not used yet, a sealed one nothing
    that can be read. No export of a secret exists.
    """
    made = Secrets(monkeypatch)
    with RecordingProxy(server.target, ca=server.ca) as proxy:
        session_of(server, proxy, tmp_path, passphrase="correct horse" if sealed else None)
        sent, requests = uploads(proxy), provision_requests(proxy)
    assert set(made.numbers) == {"r", "W r", "v", "c", "x", "W x", "s"}
    assert len(made.keys) > 10

    # Masks and check vectors travel as 27-bit residues: look at those as numbers too.
    residues = [unpack(r.c0, (2, len(r.c0) * 8 // 54)).tobytes() for r in requests]
    assert made.found(*sent, *residues) == set()
    by_proof = made.found(b"".join(sent) + made.numbers["W r"][0].tobytes())
    assert by_proof == {"W r"}, "the search itself must find what is there"

    on_disk = saved(tmp_path)
    assert {path.parent.name for path in on_disk} >= {"pool", "client-state"}
    expected = set() if sealed else {"key", "v", "c"}
    assert made.found(*on_disk.values()) == expected
    if not sealed:
        stored = [key for key in made.keys if any(t in blob for t in spellings(key) for blob in on_disk.values())]
        assert len(stored) == 1, "one chain key a batch"
        # From which the masks that were used do not follow.
        state, group = BatchKeys("any", chunks=9, used=0, chain=stored[0]), server.manifest.groups[0]
        used = {row.tobytes() for row in made.masks[group.name][:CHUNK]}
        for _ in range(9):
            keys, state = state.ratchet()
            assert used.isdisjoint(row.tobytes() for row in keys.masks(0, group))
    for path in [*on_disk, *(p for p in tmp_path.rglob("*") if p.is_dir())]:
        private = path.is_relative_to(tmp_path / "pool") or path.is_relative_to(tmp_path / "client-state")
        if private:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path.name


def test_what_was_sent_cannot_be_decrypted_without_the_key(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 1.5 and 1.4: with the key, the bytes sent give the masks, which shows that they are read rightly here; with
    the public seed in its place, with no key, or with another's, they do not."""
    made = Secrets(monkeypatch)
    with RecordingProxy(server.target, ca=server.ca) as proxy:
        session_of(server, proxy, tmp_path)
        requests = [r for r in provision_requests(proxy) if r.HasField("masks")]
    manifest = server.manifest
    for index, group in enumerate(manifest.groups[:2]):
        blocks = [r for r in requests if r.group == index]
        points, n = points_per_block(group, 8 << 20), group.in_features
        assert [(r.masks.block, r.masks.points) for r in blocks] == [(b, points) for b in range(PARAMS.n // points)]
        c0 = np.concatenate([unpack(r.c0, (2, points, n)) for r in blocks], axis=1)
        c1 = np.concatenate([expand_uniform(r.seed, r.masks.block, (points, n)) for r in blocks], axis=1)
        masks = made.masks[group.name]

        def opened(key: rlwe.SecretKey, c0: np.ndarray = c0, c1: np.ndarray = c1, rows: int = len(masks)) -> Any:
            return key.decrypt(c0.copy(), c1)[:rows]

        owners = [key for key in made.rlwe if np.array_equal(opened(key), masks)]
        assert len(owners) == 1, "one key encrypts a batch, and nothing else"
        nothing = rlwe.SecretKey()
        nothing._s[:] = 0
        for stranger in (nothing, rlwe.SecretKey()):
            assert (opened(stranger) == masks).mean() < 1e-3
        seed = blocks[0].seed
        assert seed not in made.keys
        guess = prg.uniform_mod_p(seed, b"group %d" % index, masks.size).reshape(masks.shape)
        assert (guess == masks).mean() < 1e-3


def test_the_search_finds_inputs_that_are_sent_in_clear(
    clear_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 1.10: the same search on ``protocol=clear``, which hides nothing."""
    made = Secrets(monkeypatch)
    with RecordingProxy(clear_server.target, ca=clear_server.ca) as proxy:
        session_of(clear_server, proxy, tmp_path, protocol="clear")
        assert made.found(*uploads(proxy)) == {"x"}


def test_an_evaluation_shows_group_rows_and_masked_elements_alone(server: ServerProcess, tmp_path: Path) -> None:
    """Case 1.10, docs/threat-model.md "Who sees what": the fields that the server gets, no embedding, no logit."""
    with (
        RecordingProxy(server.target, ca=server.ca) as proxy,
        (connected := connect_to(server, tmp_path, target=proxy.target, ca=None)).session,
    ):
        ids = connected.tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
        begin = proxy.mark()
        with torch.inference_mode():
            out = connected.model(input_ids=ids, output_hidden_states=True)
        messages = [m for m in proxy.messages()[begin:] if m.direction == "up" and m.raw is not None]
    assert {m.method for m in messages} == {"Evaluate"}
    requests = [pb.EvaluateRequest.FromString(m.raw or b"") for m in messages]
    names = {field.name for request in requests for field, _ in request.ListFields()}
    assert names == {"open", "id", "group", "rows", "data"}
    groups = server.manifest.groups
    rows = [r for r in requests if not r.HasField("open")]
    assert [r.group for r in rows] == list(range(len(groups)))
    assert all(len(r.data) == 4 * r.rows * groups[r.group].in_features and r.rows == ids.shape[1] for r in rows)
    there = np.sort(windows(b"".join(m.raw or b"" for m in messages)))
    for tensor in (*out.hidden_states, out.logits):
        wanted = pairs(tensor[0].numpy().view(np.uint32))
        assert not (there[np.minimum(np.searchsorted(there, wanted), len(there) - 1)] == wanted).any()


# -- 1.4 ---------------------------------------------------------------------------------------------------------------


def test_there_is_no_public_copy_of_a_key_to_be_made(tmp_path: Path, server: ServerProcess) -> None:
    """Case 1.4 cannot occur: a key has no public half, it is not copied to make what is sent. What goes out is a seed
    and residues; serialised and read back they decrypt under the one key there is, and a pool refuses to be copied."""
    key, seed = rlwe.SecretKey(), secrets.token_bytes(32)
    c1 = expand_uniform(seed, 0, (PARAMS.n, 3))
    m = prg.uniform_mod_p(secrets.token_bytes(32), b"m", 3 * PARAMS.n).reshape(PARAMS.n, 3)
    wire = pb.ProvisionRequest(group=0, seed=seed, c0=pack(key.encrypt(m, c1))).SerializeToString()
    for _ in range(2):  # serialising and decrypting leave the key as it was
        back = pb.ProvisionRequest.FromString(wire)
        assert (key.decrypt(unpack(back.c0, (2, PARAMS.n, 3)), expand_uniform(back.seed, 0, (PARAMS.n, 3))) == m).all()
    with pool_module.MaskPool.create(tmp_path / "pool", server.manifest, state_dir=tmp_path / "state") as pool:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PoolError, match="cannot be copied"):
                attempt(pool)


# -- 1.26 --------------------------------------------------------------------------------------------------------------

CANARY = "Zyx-canary-4711-wvU"


def traces(text: str) -> list[bytes]:
    """Ways in which a prompt may turn up: text, encodings of it, and its token ids."""
    raw = text.encode()
    spelled = [raw, raw.lower(), raw.upper(), raw[::-1], raw.hex().encode(), text.encode("utf-16-le")]
    spelled += [base64.b64encode(b"x" * shift + raw)[4:-4] for shift in range(3)]
    import models

    ids = models.make_tokenizer()(text)["input_ids"]
    spelled += [np.array(ids, kind).tobytes() for kind in ("<i2", "<i4", "<i8")]
    spelled += [", ".join(map(str, ids[:6])).encode(), " ".join(map(str, ids[:6])).encode()]
    return spelled


def test_the_traces_are_found_where_they_are() -> None:
    ids = np.arange(300)
    assert traces("abc")[0] == b"abc"
    hidden = b"junk" + base64.b64encode(b"12" + CANARY.encode() + b"tail") + ids.tobytes()
    assert any(trace in hidden for trace in traces(CANARY))


@pytest.fixture(scope="module")
def garbage() -> Callable[[str], Any]:
    """``garbage(kind)``: a tamper hook that spoils the answers of a proxy from the tenth on."""

    def make(kind: str) -> Any:
        def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes:
            if (method, direction) != ("Evaluate", "down") or index < 10:
                return raw
            if kind == "noise":
                return os.urandom(len(raw))
            response = pb.EvaluateResponse.FromString(raw)
            response.data = bytes(len(response.data)) if kind == "zeros" else b""
            return response.SerializeToString()

        return tamper

    return make


@pytest.mark.parametrize(
    ("case", "text", "error"),
    [
        ("answered", CANARY, None),
        ("too long", CANARY * 20, "RangeError"),
        ("noise", CANARY, "ProtocolError"),
        ("zeros", CANARY, "IntegrityError"),
    ],
)
def test_a_prompt_leaves_no_trace(
    server: ServerProcess,
    tmp_path: Path,
    garbage: Callable[[str], Any],
    case: str,
    text: str,
    error: str | None,
) -> None:
    """Case 1.26: in no log, message, file or temporary file of either side, whatever happens to the answer."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    for name in names:
        (tmp_path / name).mkdir()
    environment = {**os.environ, **{name: str(tmp_path / name) for name in names}, "OMP_NUM_THREADS": "1"}
    environment |= {"SORDINO_TOKEN": server.token, "COLUMNS": "400", "GRPC_VERBOSITY": "info"}
    tamper = garbage(case) if case in ("noise", "zeros") else None
    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy:
        done = subprocess.run(
            [Path(sys.executable).with_name("sordino"), "generate", text, "--server", proxy.target, "--raw",
             "--batch", "64", "--max-new-tokens", "4", "--temperature", "0"],
            env=environment, cwd=tmp_path, capture_output=True, timeout=120,
        )  # fmt: skip
        sent = b"".join(uploads(proxy))
    assert done.returncode == (0 if error is None else 1), done.stderr.decode()
    assert error is None or f"{error}:".encode() in done.stderr
    files = saved(tmp_path) | saved(server.state.parent)
    assert any(path.suffix == ".log" for path in files)
    places = {"stdout": done.stdout, "stderr": done.stderr, "wire": sent, **{str(p): blob for p, blob in files.items()}}
    found = [name for name, blob in places.items() if any(trace in blob for trace in traces(CANARY))]
    assert not found
