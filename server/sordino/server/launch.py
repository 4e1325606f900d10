"""Starts the ranks of a tensor-parallel server on one machine, by torch's elastic agent: what ``torchrun`` uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Final

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sordino.shared.errors import SordinoError

_RESTARTS: Final = 3
_AFTER_GRACE_S: Final = 15  # until ranks that do not end are killed


def launch(ranks: int, arguments: Sequence[str], grace_s: float) -> None:
    """Runs ``sordino`` with these arguments as so many ranks until they end, or the agent is told to stop.

    A rank that fails takes the others along, and all start again: three times.

    Args:
        grace_s: how long rank 0 may go on after a signal.

    Raises:
        SordinoError: they failed once more than that.
    """
    with TemporaryDirectory(prefix="sordino-ranks-") as logs:  # the agent wants a place, though nothing goes there
        _run(ranks, arguments, grace_s, logs)


def _run(ranks: int, arguments: Sequence[str], grace_s: float, logs: str) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="sordino",
        max_restarts=_RESTARTS,
        monitor_interval=0.5,
        shutdown_timeout=int(grace_s) + _AFTER_GRACE_S,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sordino.shared.cli", *arguments)
    except SignalException:  # rank 0 has drained
        return
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise SordinoError(f"rank {rank} ended with code {failure.exitcode}, after {_RESTARTS} restarts") from None
