"""Renders the chat template of a stranger's bundle, in a process of its own with little time and memory.

A template is a program. The sandbox of ``transformers`` keeps it from files and attributes, but not from looping for
ever or from multiplying a string until memory ends, and a thread cannot be stopped.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from sordino.shared.errors import BundleError, RangeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 5
MEMORY_BYTES: Final = 1 << 30
_WALL_S: Final = 60  # a machine under load has little processor time to give
_MORE_CHARACTERS: Final = 1 << 20  # than the messages, and four times these
_REFUSED, _TOO_MUCH = 3, 4  # exit codes


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The text of a conversation, up to where the answer begins.

    Raises:
        RangeError: the template refuses the messages.
        BundleError: it fails, or takes more time or memory than a sound one.
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
    request = json.dumps({"asked": asked, "cpu_s": CPU_S, "limit": limit}, default=str).encode()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "sordino.client.chat"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment) as process:
        try:
            out, _ = process.communicate(request, _WALL_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = _TOO_MUCH
        finally:  # after an interrupt, too
            process.kill()
            process.wait()
    if code == _REFUSED:
        raise RangeError("the model's chat template refuses these messages: leave out --system, or use --raw")
    if code == _TOO_MUCH or code < 0:
        raise BundleError(
            f"the model's chat template takes more than {CPU_S} s, {MEMORY_BYTES >> 20} MB or {limit} characters: use "
            "--raw, or ask the provider for a sound bundle"
        )
    if code:
        raise BundleError("the model's chat template fails: use --raw, or ask the provider for a sound bundle")
    return str(json.loads(out))


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
        resource.setrlimit(kind, (value, value))


def _answer(request: dict[str, Any]) -> int:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_to(request["cpu_s"])
    try:
        [text], _ = render_jinja_template(**request["asked"])
    except TemplateError:
        return _REFUSED
    except MemoryError:
        return _TOO_MUCH
    if len(text) > request["limit"]:
        return _TOO_MUCH
    json.dump(text, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(_answer(json.load(sys.stdin)))
