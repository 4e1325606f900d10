"""Renders the chat template of a stranger's bundle, in a process of its own with little time and memory.

A template is a program. The sandbox of ``transformers`` keeps it from files and attributes, but not from looping for
ever or from multiplying a string until memory ends, and a thread cannot be stopped.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
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
_INSTEAD: Final = "use --raw, or ask the provider for a sound bundle"


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    ready: subprocess.Popen[bytes] | None = None,
) -> str:
    """The text of a conversation, up to where the answer begins.

    Args:
        messages: of any role, as JSON has them; the template decides what it takes.
        tools: their JSON schemas, for templates that know tools.
        ready: a process of :func:`start`, which is used up; None starts one.

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
    # Standard input, not arguments: those are for all users of the machine to see.
    request = {"asked": asked, "cpu_s": CPU_S, "limit": limit}
    code, out = _run(ready or start(), json.dumps(request, default=str).encode())
    if code == _REFUSED:
        raise RangeError("the model's chat template refuses these messages: leave out --system, or use --raw")
    if code == _TOO_MUCH or code < 0:
        raise BundleError(
            f"the model's chat template takes more than {CPU_S} s, {MEMORY_BYTES >> 20} MB or {limit} characters: "
            f"{_INSTEAD}"
        )
    if code == _FAILED:
        raise BundleError(f"the model's chat template fails: {_INSTEAD}")
    parts = out.rsplit(_MARK, 2)
    if code or len(parts) != 3:
        raise _no_python(f"{sys.executable} ends with code {code}")
    return str(json.loads(parts[1]))


def start() -> subprocess.Popen[bytes]:
    """A process that waits to render one conversation. Started ahead, it costs an answer no time; who does not use it
    kills it.

    Raises:
        SordinoError: there is no Python to start.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # there, it is the application itself
        raise _no_python("this application has none")
    command = [sys.executable, "-I", "-c", _START]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
    except OSError as error:
        raise _no_python(f"{sys.executable}: {error.strerror}") from error
    if process.stdin is not None:
        # One that has ended already says so when it is used.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(sys.path).encode() + b"\n")
    return process


def _run(process: subprocess.Popen[bytes], request: bytes) -> tuple[int, bytes]:
    """Exit code and output of :func:`main` in its process, whatever the environment says of Python."""
    with process:
        try:
            out, _ = process.communicate(request, _WALL_S)
            return process.returncode, out
        except subprocess.TimeoutExpired:
            return _TOO_MUCH, b""
        finally:  # after an interrupt, too
            process.kill()
            process.wait()


def _no_python(why: str) -> SordinoError:
    return SordinoError(
        f"a chat template is rendered by a Python of its own, which cannot be started here ({why}): use --raw, or "
        "render the template yourself"
    )


def _limit_to(cpu_s: int) -> None:
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


def _answer() -> int:
    # Before the request is there: a process that was started ahead does this meanwhile.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin.buffer)
    _limit_to(request["cpu_s"])
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
    sys.stdout.buffer.write(_MARK + answer + _MARK)
    return 0


def main() -> None:
    """What the other process does: a request comes on its standard input, the answer goes to its standard output."""
    sys.exit(_answer())
