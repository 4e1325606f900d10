"""``sordino bench linear``: single products, by protocol, of the group shapes of a bundle.

Sordino's own protocols go to a server process over TLS on loopback. Other systems (``bench/peers`` of a checkout) run
both halves in this process, exchanging bytes. ``fp32`` is the plain product. Contestants take turns, so that a drifting
machine drifts for all, and every result is compared with the exact one. In a turn what is fast goes through the layers
of a shape twice, as decoding goes through them token by token, so that weights come from memory; the first time does
not count, but for its first product, which finds threads and caches as others left them and is a figure of its own.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from sordino.client.bench import machine
from sordino.client.blocks import prices, rounds
from sordino.client.kernels import I32
from sordino.client.local_server import server_process
from sordino.client.pool import CHUNK
from sordino.client.prg import uniform_mod_p
from sordino.client.terminal import connected, progress_bar
from sordino.client.timings import Timings
from sordino.client.transport import Traffic
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import SERVER_DIR, GroupSpec, ModelManifest
from sordino.shared.rlwe import PARAMS
from sordino.shared.transport import DEFAULT_MAX_MESSAGE_BYTES

OWN: Final = ("rlwe", "masked", "clear")
PEERS: Final = ("tenseal", "concrete")
ROWS: Final = (1, 8, 32)
_PEERS_FOLDER: Final = Path(__file__).parents[3] / "bench"
_MBIT: Final = 1000.0  # what connect() plans for by default
_SLOW_S: Final = 1.0  # what takes longer is measured once a turn, without warming up
_TURNS: Final = 3
_LAYERS: Final = 12  # whose encoded weights together fit no cache, but the server's limit
_STEPS: Final = ("encrypt", "server", "decrypt")  # of rlwe; the rest is the network and the check


@dataclass(slots=True)
class Contestant:
    """One way to a product: ``apply(group, rows [R, n])`` gives ``[R, m]``."""

    name: str
    apply: Callable[[GroupSpec, I32], NDArray[Any]]
    traffic: Traffic
    rows: tuple[int, ...]
    timings: Timings = field(default_factory=Timings)
    every_layer: bool = True
    seconds_per_weight: float = 0.0  # of the last shape, for one row


@dataclass(slots=True)
class _Figure:
    times: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # of a turn
    steps: dict[str, list[float]] = field(default_factory=dict)
    up: int = 0
    down: int = 0
    error: float = 0.0


def run_linear(
    bundle: Path,
    *,
    protocols: list[str],
    repeats: int,
    patience_s: float,
    json_path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        repeats: of a product with one row; fewer with more rows, and three of what takes longer than a second.
        patience_s: longest time for the figure of one protocol and shape; a shape that would take longer for a single
            product, judged by the shape before, is left out with a note.

    Raises:
        SordinoError: an unknown protocol, or a peer that is not there.
        BundleError: the bundle is damaged.
    """
    unknown = set(protocols) - {*OWN, *PEERS, "fp32"}
    if unknown or not protocols:
        known = ", ".join((*OWN, *PEERS, "fp32"))
        raise SordinoError(f"--protocols takes {known}, not {', '.join(sorted(unknown)) or 'nothing'}")
    if json_path and not json_path.absolute().parent.is_dir():
        raise SordinoError(f"--json {json_path}: there is no such folder")
    peers = {name: _peer(name) for name in PEERS if name in protocols}
    manifest = ModelManifest.load(bundle)
    shapes = [layers[:_LAYERS] for layers in same_shapes(manifest)]
    groups = [layers[0] for layers in shapes]
    matrices = load_matrices(bundle, manifest, [group for layers in shapes for group in layers])
    batch = _batch(repeats, min(len(layers) for layers in shapes))
    result: dict[str, Any] = {
        "machine": machine() | {"load_before": round(psutil.getloadavg()[0], 2)},
        "model": manifest.model_name,
        "planned_for_mbit": _MBIT,
        "results": [],
        "one_of_each": {},
        "setup": {},
        "notes": [
            "rlwe, masked and clear: two processes, TLS on loopback; peers: both halves in one process, no network",
            f"ms: {len(shapes[0])} layers in a row, after as many that do not count; ms_first: the first of a turn",
            "bytes are of one product; those of masks, check vectors and evaluation keys are under setup",
            *([f"masked used a batch of {batch} masks"] if "masked" in protocols else []),
        ],
    }
    with ExitStack() as stack:
        contestants = _own(stack, bundle, [name for name in OWN if name in protocols], batch)
        with progress_bar("keys of peers") as done:
            for number, (peer_name, module) in enumerate(peers.items()):
                done(number, len(peers))
                peer = module.connect({group.name: matrices[group.name] for group in groups})
                contestants[peer_name] = Contestant(peer_name, peer.apply, peer.traffic, ROWS[:1], every_layer=False)
        if "fp32" in protocols:
            contestants["fp32"] = Contestant("fp32", _plain(matrices), Traffic(), ROWS)
        for name, contestant in contestants.items():
            up, down = (counts.get("provision", 0) for counts in (contestant.traffic.up, contestant.traffic.down))
            result["setup"][name] = {"bytes_up": up, "bytes_down": down}
        ordered = [contestants[name] for name in dict.fromkeys(protocols)]
        with progress_bar("products") as done:
            for number, (layers, rows) in enumerate((layers, rows) for layers in shapes for rows in ROWS):
                done(number, len(groups) * len(ROWS))
                group = layers[0]
                racing = [c for c in ordered if rows in c.rows and _fits(c, group, patience_s, result["notes"])]
                products = [_product_of(layer, matrices[layer.name], rows) for layer in layers]
                figures = _race(racing, products, repeats, patience_s)
                result["results"] += [_entry(name, group, rows, figure) for name, figure in figures.items()]
    _compare(result)
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


def same_shapes(manifest: ModelManifest) -> list[list[GroupSpec]]:
    """The groups by shape, the smallest matrix first."""
    found: dict[tuple[int, int, int], list[GroupSpec]] = {}
    for group in manifest.groups:
        found.setdefault((group.in_features, group.out_features, group.planes), []).append(group)
    return sorted(found.values(), key=lambda layers: layers[0].in_features * layers[0].out_features)


def load_matrices(
    bundle: Path, manifest: ModelManifest, groups: list[GroupSpec]
) -> dict[str, NDArray[np.int8] | NDArray[np.int16]]:
    """The integer matrices ``[m, n]`` of some groups: a benchmark has both sides of a bundle."""
    found: dict[str, NDArray[np.int8] | NDArray[np.int16]] = {}
    wanted = {group.name: group for group in groups}
    for name in manifest.server_files:
        if not name.endswith(".safetensors"):
            continue
        with safe_open(bundle / SERVER_DIR / name, framework="np") as file:
            for key in wanted.keys() & set(file.keys()):
                stored = file.get_tensor(key).reshape(wanted[key].planes, -1, wanted[key].in_features)
                found[key] = stored[0] if len(stored) == 1 else stored[0] + 256 * stored[1].astype(np.int16)
    return found


def predicted_seconds(group: GroupSpec, rows: int) -> tuple[float, float]:
    """What the planner expects of ``rlwe``: all in all at the planned bandwidth, and without the bytes' way."""
    choices = prices(_MBIT * 125_000)
    whole = local = 0.0
    for part in rounds(0, group, rows, max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES, choices=choices):
        choice = next(choice for choice in choices if choice.bits == part.blocks[0].bits)
        parts = [block.part for block in part.blocks]
        whole += choice.of(parts, group.planes)
        local += replace(choice, byte=0.0).of(parts, group.planes)
    return whole, local


def _peer(name: str) -> Any:
    if not (_PEERS_FOLDER / "peers").is_dir():
        raise SordinoError(f"protocol {name} is not in the package: run this in a checkout of Sordino (bench/peers)")
    if str(_PEERS_FOLDER) not in sys.path:
        sys.path.append(str(_PEERS_FOLDER))
    try:
        return importlib.import_module(f"peers.{name}")
    except ModuleNotFoundError as error:
        raise SordinoError(
            f"protocol {name} needs {error.name}: run pip install -c constraints.txt -e '.[peers]' in the checkout"
        ) from None


def _own(stack: ExitStack, bundle: Path, names: list[str], batch: int) -> dict[str, Contestant]:
    if not names:
        return {}
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-bench-")))
    allow_clear = "clear" in names
    target, ca, token, _ = stack.enter_context(server_process(bundle, work / "server", allow_clear=allow_clear))
    options: dict[str, Any] = {
        "pool": work / "pool",
        "state_dir": work / "ledger",
        "batch": batch,
        "low_water": 0,
        "bandwidth_mbit": _MBIT,
    }
    contestants = {}
    for name in names:
        link = stack.enter_context(
            connected(target, ca=ca, token_file=token, protocol=name, cache=work / "cache", **options)
        )
        contestants[name] = Contestant(
            name, link.session.protocol.apply, link.session.traffic, ROWS, link.session.timings
        )
    return contestants


def _plain(matrices: Mapping[str, NDArray[Any]]) -> Callable[[GroupSpec, I32], NDArray[Any]]:
    weights = {name: torch.from_numpy(matrix.astype(np.float32)) for name, matrix in matrices.items()}

    @torch.inference_mode()
    def apply(group: GroupSpec, rows: I32) -> NDArray[Any]:
        product = torch.nn.functional.linear(torch.from_numpy(rows.astype(np.float32)), weights[group.name])
        return np.asarray(product.numpy())

    return apply


def _rows(group: GroupSpec, count: int) -> I32:
    """Rows that fill the range of the activations, the same in every run."""
    drawn = uniform_mod_p(bytes(32), group.name.encode(), count * group.in_features).astype(np.int64)
    return (drawn % (2 * group.x_max + 1) - group.x_max).astype(np.int32).reshape(count, group.in_features)


def _turns(rows: int, repeats: int, layers: int) -> int:
    return max(_TURNS, -(-(repeats if rows == 1 else repeats // 2) // layers))


def _batch(repeats: int, layers: int) -> int:
    """Masks for the products of a layer; every layer has its own part of a mask."""
    slots = sum(rows * (1 + 2 * _turns(rows, repeats, layers)) for rows in ROWS)
    return min(PARAMS.n, -(-slots // CHUNK) * CHUNK)


def _fits(contestant: Contestant, group: GroupSpec, patience_s: float, notes: list[str]) -> bool:
    expected = contestant.seconds_per_weight * group.in_features * group.out_features
    if expected > patience_s:
        shape = f"{group.in_features} -> {group.out_features}"
        notes.append(f"{contestant.name}: {shape} left out, about {expected:.0f} s for one product")
    return expected <= patience_s


@dataclass(frozen=True, slots=True)
class _Product:
    group: GroupSpec
    rows: I32
    exact: NDArray[np.float64]


def _product_of(group: GroupSpec, matrix: NDArray[Any], count: int) -> _Product:
    rows = _rows(group, count)
    return _Product(group, rows, rows.astype(np.float64) @ matrix.T.astype(np.float64))  # below 2^53


def _race(racing: list[Contestant], products: list[_Product], repeats: int, patience_s: float) -> dict[str, _Figure]:
    """``products`` are of one shape, a layer each; a peer has the first."""
    figures = {contestant.name: _Figure() for contestant in racing}
    for contestant in racing:  # what is made ready at first use
        if contestant.every_layer:
            for product in products:
                _run(contestant, product, _Figure())
    for _ in range(_turns(products[0].rows.shape[0], repeats, len(products))):
        for contestant in racing:
            figure = figures[contestant.name]
            if contestant.every_layer:
                warming = _Figure()
                for product in products:
                    _run(contestant, product, warming)
                figure.first.append(warming.times[0])
                for product in products:
                    _run(contestant, product, figure)
            elif not figure.times or sum(figure.times) + figure.times[0] < patience_s:
                _run(contestant, products[0], figure)
                if figure.times[0] < _SLOW_S:
                    for _ in products[1:]:
                        _run(contestant, products[0], figure)
    return figures


def _run(contestant: Contestant, product: _Product, figure: _Figure) -> None:
    traffic = contestant.traffic
    up, down = traffic.up.get("online", 0), traffic.down.get("online", 0)
    contestant.timings.clear()
    start = time.perf_counter()
    result = contestant.apply(product.group, product.rows)
    figure.times.append(time.perf_counter() - start)
    for step, spent in contestant.timings.items():
        figure.steps.setdefault(step, []).append(spent)
    figure.up, figure.down = traffic.up.get("online", 0) - up, traffic.down.get("online", 0) - down
    figure.error = max(figure.error, float(np.abs(result - product.exact).max()))
    contestant.seconds_per_weight = figure.times[-1] / product.exact.size / product.rows.shape[1]


def _entry(name: str, group: GroupSpec, rows: int, figure: _Figure) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "protocol": name,
        "group": group.name,
        "in_features": group.in_features,
        "out_features": group.out_features,
        "rows": rows,
        "ms_p50": round(1e3 * statistics.median(figure.times), 3),
        "ms_min": round(1e3 * min(figure.times), 3),
        "repeats": len(figure.times),
        "bytes_up": figure.up,
        "bytes_down": figure.down,
        "largest_error": round(figure.error, 1),
    }
    if name == "rlwe":
        whole, local = predicted_seconds(group, rows)
        entry |= {"predicted_ms": round(1e3 * whole, 3), "predicted_without_network_ms": round(1e3 * local, 3)}
    if figure.first:
        entry["ms_first_p50"] = round(1e3 * statistics.median(figure.first), 3)
    if figure.steps:
        entry["steps_ms_p50"] = {step: round(1e3 * statistics.median(spent), 3) for step, spent in figure.steps.items()}
    return entry


def _compare(result: dict[str, Any]) -> None:
    """Adds each figure's ratio to rlwe's, and the sums over the shapes that both did with one row."""
    base = {
        (entry["group"], entry["rows"]): entry["ms_p50"] for entry in result["results"] if entry["protocol"] == "rlwe"
    }
    sums: dict[str, list[tuple[float, float | None]]] = {}
    for entry in result["results"]:
        rlwe = base.get((entry["group"], entry["rows"]))
        entry["ratio_to_rlwe"] = _ratio(entry["ms_p50"], rlwe)
        if entry["rows"] == 1:
            sums.setdefault(entry["protocol"], []).append((entry["ms_p50"], rlwe))
    for name, pairs in sums.items():
        total, rlwe = sum(ms for ms, _ in pairs), sum(rlwe or 0 for _, rlwe in pairs)
        result["one_of_each"][name] = {
            "shapes": len(pairs),
            "ms": round(total, 3),
            "ratio_to_rlwe": _ratio(total, rlwe or None),
        }


def _ratio(ms: float, rlwe: float | None) -> float | None:
    return None if rlwe is None else float(f"{ms / rlwe:.4g}")


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"one product, {result['model']}")
    for column in ("product", "protocol", "ms", "/ rlwe", "kB up", "kB down", "error"):
        table.add_column(column, justify="left" if column in ("product", "protocol") else "right", no_wrap=True)
    before = ""
    for entry in result["results"]:
        product = _product(entry)
        if before not in ("", product):
            table.add_section()
        table.add_row(
            "" if product == before else product,
            entry["protocol"],
            *(
                "" if figure is None else _short(figure)
                for figure in (
                    entry["ms_p50"],
                    entry["ratio_to_rlwe"],
                    entry["bytes_up"] / 1e3,
                    entry["bytes_down"] / 1e3,
                    entry["largest_error"],
                )
            ),
        )
        before = product
    console.print(table)
    planned = [entry for entry in result["results"] if "predicted_ms" in entry]
    if planned:
        planned_by = f"the price it is planned by: blocks, and their bytes at {result['planned_for_mbit']:,.0f} Mbit/s"
        table = Table(title=f"rlwe in ms, some of its parts, and {planned_by}")
        for column in ("product", "ms", *_STEPS, "blocks", "+ bytes"):
            left = column == "product"
            table.add_column(column, justify="left" if left else "right", no_wrap=left)
        for entry in planned:
            steps = [entry["steps_ms_p50"][step] for step in _STEPS]
            figures = (entry["ms_p50"], *steps, entry["predicted_without_network_ms"], entry["predicted_ms"])
            table.add_row(_product(entry), *(_short(figure) for figure in figures))
        console.print(table)
    for name, total in result["one_of_each"].items():
        ratio = "" if total["ratio_to_rlwe"] is None else f", {_short(total['ratio_to_rlwe'])} x rlwe"
        console.print(f"one row of every shape, {name}: {_short(total['ms'])} ms{ratio}", highlight=False)
    for name, setup in result["setup"].items():
        megabytes = f"{setup['bytes_up'] / 1e6:,.1f} MB up, {setup['bytes_down'] / 1e6:,.1f} MB down"
        console.print(f"before the first product, {name}: {megabytes}", highlight=False)
    for note in result["notes"]:
        console.print(note, style="dim", highlight=False)


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _product(entry: dict[str, Any]) -> str:
    rows = f"{entry['rows']} row{'s' if entry['rows'] > 1 else ''}"
    return f"{entry['in_features']} -> {entry['out_features']}, {rows}"
