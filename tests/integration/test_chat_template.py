"""Chat templates of a stranger: the same text as transformers renders, and an end to those that have none."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import models
import pytest
from transformers import PreTrainedTokenizerFast

from sordino.client import chat
from sordino.client.chat import Renderer, render
from sordino.shared.errors import BundleError, RangeError, SordinoError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Größe?\u2028 <b> "q" \U0001f9c5'}]
LOOP = "{%% for i in range(99999) %%}%s{%% endfor %%}"
ENDLESS = LOOP % (LOOP % (LOOP % ""))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return models.make_tokenizer()


@pytest.mark.parametrize(
    "template",
    [
        models.CHAT_TEMPLATE,
        "{{ messages | tojson(indent=1) }}{% generation %}{{ bos_token + eos_token }}{% endgeneration %}",
        "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% break %}{% endfor %}{{ n.k }}",
    ],
)
def test_the_text_is_that_of_transformers(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert render(tokenizer, MESSAGES) == expected


def test_tools_and_messages_of_any_role_and_shape(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Köln"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Wetter?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Regen"},
    ]
    expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert "Köln" in expected
    assert render(tokenizer, messages, tools) == expected


def test_one_process_after_another(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a template does ends with its own process; one that is gone is started anew."""
    monkeypatch.setattr(chat, "CPU_S", 1)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    with Renderer() as renderer:
        renderer.start()
        assert renderer._process is not None
        first = renderer._process.pid
        for hostile in (ENDLESS, "{{ 'a' * 10 ** 10 }}", "{{ 1 / 0 }}"):
            tokenizer.chat_template = hostile
            with pytest.raises(BundleError):
                renderer.render(tokenizer, MESSAGES)
            tokenizer.chat_template = models.CHAT_TEMPLATE
            assert renderer.render(tokenizer, MESSAGES) == expected
            assert renderer._process.pid == first
        renderer._process.kill()
        with pytest.raises(SordinoError, match=r"cannot be started here .*code -9"):
            renderer.render(tokenizer, MESSAGES)
        assert renderer.render(tokenizer, MESSAGES) == expected
        again = renderer._process
    assert again.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("template", "kind", "text"),
    [
        (ENDLESS, BundleError, "takes more than"),
        ("{{ 10 ** (10 ** 10) }}", BundleError, "takes more than"),  # no instruction of Python ends before this
        ("{{ 'a' * 10 ** 10 }}", BundleError, "takes more than"),
        ("{{ 'a' * 10 ** 7 }}", BundleError, "takes more than"),
        ("{{ 1 / 0 }}", BundleError, "fails"),
        (r"{{ '\ud800' }}", BundleError, "fails"),  # half of a character, which no tokenizer takes
        ("{{ ''.__class__.__mro__ }}", RangeError, "refuses"),
        ("{% if %}", RangeError, "refuses"),
        ("{{ raise_exception(messages[1].content) }}", RangeError, "refuses"),
    ],
)
def test_a_hostile_template_is_an_error(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    kind: type[SordinoError],
    text: str,
) -> None:
    monkeypatch.setattr(chat, "CPU_S", 1)
    tokenizer.chat_template = template
    with pytest.raises(kind, match=f"chat template {text}") as caught:
        render(tokenizer, MESSAGES)
    assert "Größe" not in str(caught.value)


def test_several_templates_without_a_default(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = {"one": "1", "two": "2"}
    with pytest.raises(BundleError, match="several chat templates"):
        render(tokenizer, MESSAGES)


def test_the_surroundings_do_not_matter(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site')")
    for name, value in {"PATH": str(tmp_path), "INSPECT": "1", "IOENCODING": "utf-16", "OPTIMIZE": "x"}.items():
        monkeypatch.setenv(f"PYTHON{name}", value)
    # What starts with every Python, of a kind that no option keeps out.
    monkeypatch.setattr(chat, "_START", f"print('hello'); {chat._START}")
    tokenizer.chat_template = "{{ messages[1].content }}\0"
    assert render(tokenizer, MESSAGES) == MESSAGES[1]["content"] + "\0"


@pytest.mark.parametrize("executable", [None, "", "/nosuch/python", "/", "/bin/false", "an application"])
def test_without_a_python_to_start(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: str | None
) -> None:
    started = tmp_path / "started"
    if executable == "an application":  # it is not started again
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        application = tmp_path / "application"
        application.write_text(f"#!/bin/sh\ntouch {started}\n")
        application.chmod(0o700)
        executable = str(application)
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(SordinoError, match=r"cannot be started here .*--raw") as caught:
        render(tokenizer, MESSAGES)
    assert type(caught.value) is SordinoError
    assert not started.exists()


def test_where_memory_cannot_be_limited_the_other_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    limited = []

    def setrlimit(kind: int, _: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        limited.append(kind)

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    chat.limit_to(1)
    assert limited == [resource.RLIMIT_CPU, resource.RLIMIT_CORE]


def test_an_interrupt_ends_it_at_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "CPU_S", 60)
    tokenizer.chat_template = ENDLESS
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        render(tokenizer, MESSAGES)
    assert time.monotonic() - start < 20
