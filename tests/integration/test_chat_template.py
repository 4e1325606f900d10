"""Chat templates of a stranger: the same text as transformers renders, and an end to those that have none."""

from __future__ import annotations

import os
import signal
import threading
import time

import models
import pytest
from transformers import PreTrainedTokenizerFast

from sordino.client import chat
from sordino.client.chat import render
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


@pytest.mark.parametrize(
    ("template", "kind", "text"),
    [
        (ENDLESS, BundleError, "takes more than"),
        ("{{ 10 ** (10 ** 10) }}", BundleError, "takes more than"),  # no instruction of Python ends before this
        ("{{ 'a' * 10 ** 10 }}", BundleError, "takes more than"),
        ("{{ 'a' * 10 ** 7 }}", BundleError, "takes more than"),
        ("{{ 1 / 0 }}", BundleError, "fails"),
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


def test_an_interrupt_ends_it_at_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "CPU_S", 60)
    tokenizer.chat_template = ENDLESS
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        render(tokenizer, MESSAGES)
    assert time.monotonic() - start < 20
