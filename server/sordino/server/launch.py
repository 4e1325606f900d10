"""Starts the ranks of a tensor-parallel server on one machine, by torch's elastic agent: what ``torchrun`` uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sordino.shared.errors import SordinoError

# What the agent, or torchrun itself, tells each rank.
RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
_RESTARTS: Final = 3


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Runs ``sordino`` with these arguments as so many ranks until they end, or the agent is told to stop.

    A rank that fails takes the others along, and all start again: three times.

    Raises:
        SordinoError: they failed once more than that.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="sordino",
        max_restarts=_RESTARTS,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sordino.shared.cli", *arguments)
    except SignalException:  # rank 0 has drained
        return
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise SordinoError(f"rank {rank} ended with code {failure.exitcode}, after {_RESTARTS} restarts") from None
