"""Renders the chat template of a stranger's bundle, in a process of its own with little time and memory.

A template is a program. The sandbox of ``transformers`` keeps it from files and attributes, but not from looping for
ever or from multiplying a string until memory ends, and a thread cannot be stopped.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
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
    "import json, sys; request = json.load(sys.stdin.buffer); sys.path[:] = request['path']; "
    "from sordino.client.chat import main; main(request)"
)
_MARK: Final = b"\0"  # around the answer, which has none: whatever else starts with Python may print, too
_INSTEAD: Final = "use --raw, or ask the provider for a sound bundle"


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The text of a conversation, up to where the answer begins.

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
        "chat_template": template,
        "add_generation_prompt": True,
        **tokenizer.special_tokens_map,
    }
    limit = _MORE_CHARACTERS + 4 * sum(len(text) for message in messages for text in message.values())
    # Standard input, not arguments: those are for all users of the machine to see.
    request = {"asked": asked, "cpu_s": CPU_S, "limit": limit, "path": sys.path}
    code, out = _run(json.dumps(request, default=str).encode())
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


def _run(request: bytes) -> tuple[int, bytes]:
    """Exit code and output of :func:`main` in a process of its own, whatever the environment says of Python."""
    if not sys.executable or getattr(sys, "frozen", False):  # there, it is the application itself
        raise _no_python("this application has none")
    command = [sys.executable, "-I", "-c", _START]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise _no_python(f"{sys.executable}: {error.strerror}") from error
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


def _answer(request: dict[str, Any]) -> int:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

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


def main(request: dict[str, Any]) -> None:
    """What the other process does; the answer goes to its standard output."""
    sys.exit(_answer(request))
