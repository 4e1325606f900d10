"""Log lines for machines: one JSON object a line; and what is kept out of any log."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime
from enum import StrEnum
from typing import IO, Any, Final, cast

from rich.console import Console
from rich.text import Text

log = logging.getLogger(__name__)
_FIELDS: Final = "sordino_fields"


class LogFormat(StrEnum):
    """For people, or for machines."""

    text = "text"
    json = "json"


def fields(**values: str | float) -> dict[str, dict[str, str | float]]:
    """The ``extra`` of a log call: what its text says, by name."""
    return {_FIELDS: values}


class JsonFormatter(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, ``logger``, ``event`` (the text), the fields, and ``trace`` of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _WithoutStrangers(logging.Filter):
    """gRPC writes what it cannot decode, a token too, with a trace: of any stranger's path and headers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("Invalid encoding", "Unexpected [UnicodeDecodeError]"))


def keep_strangers_out() -> None:
    """From now on no bytes of a call's head come into the log."""
    logger = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(known, _WithoutStrangers) for known in logger.filters):
        logger.addFilter(_WithoutStrangers())


class _Notes(io.TextIOBase):
    """A console's file: what is printed for people becomes lines of the log."""

    def write(self, text: str) -> int:
        for line in Text.from_ansi(text).plain.splitlines():
            log.info("%s", line)
        return len(text)


def use_json(console: Console) -> None:
    """From now on the handlers that are there write JSON, and ``console`` writes to them."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    console.file = cast(IO[str], _Notes())
