"""Renders the chat template of a stranger's bundle, in a process of its own with little time and memory.

A template is a program. The sandbox of ``transformers`` keeps it from files and attributes, but not from looping for
ever or from multiplying a string until memory ends, and a thread cannot be stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sordino.shared.errors import BundleError, RangeError, SordinoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 5
MEMORY_BYTES: Final = 1 << 30
_WALL_S: Final = 60  # a machine under load has little processor time to give
_MORE_CHARACTERS: Final = 1 << 20  # than the messages, and four times these
_REFUSED, _TOO_MUCH, _FAILED = 3, 4, 5  # exit codes; any other is not the template's
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from sordino.client.chat import main; main()"
)
_MARK: Final = b"\0"  # around the answer, which has none: whatever else starts with Python may print, too
_REPLY_END: Final = re.compile(rb"\0-?\d+\n\Z")
_LONGEST_END: Final = 16
_INSTEAD: Final = "use --raw, or ask the provider for a sound bundle"


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of one conversation, as :meth:`Renderer.render`."""
    with Renderer() as renderer:
        return renderer.render(tokenizer, messages, tools)


class Renderer:
    """Renders conversations, each in a process of its own, forked from one that has loaded what that takes.

    Safe for several threads, which take turns. A context manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process that loads; without it the first conversation does.

        Raises:
            SordinoError: there is no Python to start.
        """
        with self._lock:
            if self._process is None:
                self._process = _start()

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation, up to where the answer begins.

        Args:
            messages: of any role, as JSON has them; the template decides what it takes.
            tools: their JSON schemas, for templates that know tools.

        Raises:
            RangeError: the template refuses the messages.
            BundleError: it fails, or takes more time or memory than a sound one.
            SordinoError: there is no Python to start.
        """
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise BundleError("the bundle has several chat templates and names none as default: use --raw") from error
        asked = {
            "conversations": [messages],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": True,
            **tokenizer.special_tokens_map,
        }
        said = sum(len(json.dumps(part, ensure_ascii=False, default=str)) for part in (*messages, *(tools or ())))
        limit = _MORE_CHARACTERS + 4 * said
        request = {"asked": asked, "cpu_s": CPU_S, "limit": limit}
        code, answer = self._exchange(json.dumps(request, default=str).encode() + b"\n")
        if code == _REFUSED:
            raise RangeError("the model's chat template refuses these messages: leave out --system, or use --raw")
        if code == _TOO_MUCH or code < 0:
            raise BundleError(
                f"the model's chat template takes more than {CPU_S} s, {MEMORY_BYTES >> 20} MB or {limit} characters: "
                f"{_INSTEAD}"
            )
        if code == _FAILED:
            raise BundleError(f"the model's chat template fails: {_INSTEAD}")
        return str(json.loads(answer))

    def close(self) -> None:
        with self._lock:
            self._end()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        """Exit code and answer of the process that was forked for ``request``."""
        with self._lock:
            process = self._process = self._process or _start()
            reply = None
            try:
                reply = _talk(process, request)
            finally:  # after an interrupt, too
                if reply is None or not _REPLY_END.search(reply):
                    self._end()
        if reply is None:
            return _TOO_MUCH, b""
        parts = reply.rsplit(_MARK, 2)
        if len(parts) != 3:
            raise _no_python(f"{sys.executable} ends with code {process.returncode}")
        return int(parts[2]), parts[1]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it forked, too
                process.kill()


def _start() -> subprocess.Popen[bytes]:
    """A process that runs :func:`main`, whatever the environment says of Python."""
    if not sys.executable or getattr(sys, "frozen", False):  # there, it is the application itself
        raise _no_python("this application has none")
    command = [sys.executable, "-I", "-c", _START]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise _no_python(f"{sys.executable}: {error.strerror}") from error
    _write(process, json.dumps(sys.path).encode() + b"\n")
    return process


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    view = memoryview(line)
    with contextlib.suppress(BrokenPipeError):  # of one that has ended: it says so where it is read from
        while view and process.stdin is not None:
            view = view[process.stdin.write(view) :]


def _talk(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The reply to a request; less where the process ended, None where it did not come in time."""
    _write(process, request)
    reply, deadline = bytearray(), time.monotonic() + _WALL_S
    if process.stdout is None:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not _REPLY_END.search(reply[-_LONGEST_END:]):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                break
            reply += part
    return bytes(reply)


def _no_python(why: str) -> SordinoError:
    return SordinoError(
        f"a chat template is rendered by a Python of its own, which cannot be started here ({why}): use --raw, or "
        "render the template yourself"
    )


def limit_to(cpu_s: int) -> None:
    """Leaves this process so many seconds more of the processor, and :data:`MEMORY_BYTES` more memory."""
    import psutil

    usage = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + cpu_s,
        resource.RLIMIT_AS: psutil.Process().memory_info().vms + MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,  # a dump would hold the prompt
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            if kind != resource.RLIMIT_AS:  # which macOS does not always have
                raise


def _answer(line: bytes) -> int:
    """In the process that is forked for one request: its exit code."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.loads(line)
    limit_to(request["cpu_s"])
    try:
        [text], _ = render_jinja_template(**request["asked"])
        if len(text) > request["limit"]:
            return _TOO_MUCH
        text.encode()  # fails for halves of characters
        answer = json.dumps(text).encode()
    except TemplateError:
        return _REFUSED
    except MemoryError:
        return _TOO_MUCH
    except Exception:  # a stranger's program: anything may happen, and its text may repeat the prompt
        return _FAILED
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return 0


def main() -> None:
    """What the other process does: a line of its standard input is a request, a line of its output the reply: a mark,
    the text in JSON if there is one, a mark, and the exit code of the process that was forked for it.
    """
    import psutil  # noqa: F401  (what limit_to and _answer want: loaded once)
    from transformers.utils import chat_template_utils  # noqa: F401

    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        out.write(_MARK)
        out.flush()
        forked = os.fork()
        if not forked:
            code = _FAILED
            try:
                code = _answer(line)
            finally:
                os._exit(code)
        _, status = os.waitpid(forked, 0)
        out.write(_MARK + b"%d\n" % os.waitstatus_to_exitcode(status))
        out.flush()
