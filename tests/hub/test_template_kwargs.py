"""Chat template variables used in training: stored with the heads, and overridable in each call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from headstart.api import Decoder
from headstart.data.prompts.chat import template_kwargs, with_template_kwargs
from headstart.data.prompts.questions import Question
from headstart.doctor.subject import find_subject
from headstart.errors import UserError
from headstart.eval.evaluate import evaluate
from headstart.eval.options import EvalOptions
from headstart.model.model import Target
from tests.data.test_template_kwargs import QUIET, SWITCH
from tests.hub.helpers import export
from tests.test_cli import refused, works
from tests.tiny import tiny_model, tiny_tokenizer

WITH_TOOLS = "{% for tool in tools or [] %}{{ tool['name'] + ' ' }}{% endfor %}" + SWITCH
ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads trained with enable_thinking=false, next to their target."""
    where = tmp_path_factory.mktemp("quiet")
    tokenizer = tiny_tokenizer(WITH_TOOLS)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024)
    model.save_pretrained(where / "target")
    tokenizer.save_pretrained(where / "target")
    export(where / "heads", Target(model, with_template_kwargs(tokenizer, QUIET), str(where / "target")))
    return where / "heads"


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return headstart.load(folder, dtype="float32")


def read(decoder: Decoder, **options: Any) -> str:
    """Return the rendered prompt."""
    return str(decoder.target.tokenizer.decode(decoder.tokens(ASKED, **options)))


def test_variables_are_kept_with_the_heads_and_on_the_card(folder: Path, tiny_target: Target, tmp_path: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["target"]["chat_template_kwargs"] == QUIET
    assert '`{"enable_thinking": false}`' in (folder / "README.md").read_text()
    export(tmp_path / "none", tiny_target)
    assert "chat_template_kwargs" not in json.loads((tmp_path / "none" / "config.json").read_text())["target"]


def test_prompts_are_rendered_as_in_training(folder: Path, decoder: Decoder, tmp_path: Path) -> None:
    assert read(decoder).startswith("quiet <|im_start|>user")
    lent = headstart.load(folder, target=Target(decoder.target.model, tiny_tokenizer(WITH_TOOLS)))
    assert read(lent).startswith("quiet")
    export(tmp_path / "again", decoder.target)  # as tuning does
    assert template_kwargs(headstart.load(tmp_path / "again", dtype="float32").target.tokenizer) == QUIET
    assert template_kwargs(find_subject(str(folder)).target.tokenizer) == QUIET
    options = EvalOptions(max_new_tokens=2, baselines=False)
    results = evaluate(decoder, [Question(1, "none", ["Hi"])], options)
    assert results["settings"]["chat_template_kwargs"] == QUIET
    assert results["per_prompt"][0]["prompt_tokens"] == len(decoder.tokens(ASKED))
    louder = EvalOptions(max_new_tokens=2, baselines=False, chat_template_kwargs={"enable_thinking": True})
    results = evaluate(decoder, [Question(1, "none", ["Hi"])], louder)
    loud = decoder.tokens(ASKED, chat_template_kwargs={"enable_thinking": True})
    assert results["per_prompt"][0]["prompt_tokens"] == len(loud)


def test_variables_unknown_to_a_target_are_dropped(folder: Path, decoder: Decoder) -> None:
    for tokenizer in (None, tiny_tokenizer(None), tiny_tokenizer()):
        target = Target(decoder.target.model, tokenizer)
        assert headstart.load(folder, target=target).target is target


def test_every_call_accepts_variables_and_tools(decoder: Decoder) -> None:
    loud = {"enable_thinking": True}
    assert read(decoder, chat_template_kwargs=loud).startswith("<|im_start|>user")
    tools = [{"name": "weather"}]
    assert read(decoder, tools=tools).startswith("weather quiet <|im_start|>")
    short: dict[str, Any] = {"max_new_tokens": 4, "chat_template_kwargs": loud, "tools": tools}
    wanted = decoder.generate(decoder.tokens(ASKED, False, tools, loud), max_new_tokens=4).tokens
    assert decoder.generate(ASKED, **short).tokens == wanted
    assert decoder.generate_batch([ASKED], **short)[0].tokens == wanted
    stream = decoder.stream(ASKED, **short)
    list(stream)
    assert stream.answer is not None and stream.answer.tokens == wanted
    for options, problem in (
        ({"chat_template_kwargs": {"enable_thinkin": 1}}, "no variable 'enable_thinkin'"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is "),
        ({"tools": 5}, "tools is 5"),
    ):
        with pytest.raises(UserError, match=problem):
            decoder.generate(ASKED, **options)


def test_command_line_takes_variables(folder: Path, decoder: Decoder) -> None:
    asked = ("generate", folder, "--prompt", "Hi", "--max-new-tokens", 6, "--dtype", "float32")
    loud = {"enable_thinking": True}
    for options, variables in (((), None), (("--chat-template-kwargs", json.dumps(loud)), loud)):
        wanted = decoder.generate("Hi", max_new_tokens=6, chat_template_kwargs=variables).text
        assert works(*asked, *options).stdout == wanted + "\n"
        talk = ("chat", folder, "--max-new-tokens", 6, "--dtype", "float32", *options)
        assert works(*talk, stdin="Hi\n\n").stdout == wanted + "\n"
    for wrong in ("{", "[1]", "3"):
        assert "is not a JSON object" in refused(*asked, "--chat-template-kwargs", wrong)
