"""Variables for the chat template; reasoning and tool calls that a template may not render."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.data.conversations.building import build_conversations
from headstart.data.conversations.identity import identity
from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import has_variable, prompt_tokens, with_template_kwargs
from headstart.data.prompts.self_prompts import user_prefix
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.pipeline.run import Run
from headstart.recipes.recipe import parse_recipe
from headstart.recipes.sections import DataSection
from tests.data.loading import load, write_rows
from tests.tiny import CHATML, tiny_tokenizer

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}{{ 'quiet ' }}{% endif %}" + CHATML
REASONS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['reasoning_content'] is defined %}{{ '<think>' + m['reasoning_content'] + '</think>' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUIET = {"enable_thinking": False}
SIZES = {"conversations": 4, "heldout": 2, "validation": 2, "max_new_tokens": 8, "batch_size": 4}


@pytest.fixture(scope="module")
def switched(tiny_target: Target) -> Target:
    return Target(tiny_target.model, tiny_tokenizer(SWITCH), "switched")


def test_variables_reach_every_rendering(switched: Target, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    bound = with_template_kwargs(switched.tokenizer, QUIET)
    assert switched.tokenizer.decode(prompt_tokens(asked, bound)).startswith("quiet <|im_start|>user")
    assert not switched.tokenizer.decode(prompt_tokens(asked, switched.tokenizer)).startswith("quiet")
    assert bound.decode(encode([*asked, {"role": "assistant", "content": "Ho"}], bound)[0]).startswith("quiet")
    assert user_prefix(bound).startswith("quiet")

    path = write_rows(tmp_path / "p.jsonl", *({"turns": [f"Question {i}", "And?"]} for i in range(9)))
    data = DataSection.model_validate({"prompts": path, "chat_template_kwargs": QUIET, **SIZES})
    splits = build_conversations(switched, data, tmp_path / "data")
    for item in (*splits.train, *splits.validation, *splits.heldout):
        assert switched.tokenizer.decode(item.tokens).startswith("quiet <|im_start|>user")
    longest = len(prompt_tokens([{"role": "user", "content": "Question 1"}], switched.tokenizer))
    assert len(load(path, "train", switched.tokenizer, max_prompt_tokens=longest).prompts) == 9
    with pytest.raises(UserError, match="9 over"):
        load(path, "train", bound, max_prompt_tokens=longest)


def test_run_binds_them_to_its_target(switched: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the report and the plan render as the data do."""
    monkeypatch.setattr("headstart.model.loading.load_target", lambda *_, **__: switched)
    values = {"name": "a", "data": {"chat_template_kwargs": QUIET}, "heads": {"family": "medusa"}}
    target = Run(parse_recipe(values), tmp_path, Console(quiet=True)).target
    assert user_prefix(target.tokenizer).startswith("quiet")
    assert not user_prefix(switched.tokenizer).startswith("quiet"), "the shared tokenizer is unchanged"
    assert target.model is switched.model


def test_identity_includes_them_when_set(switched: Target) -> None:
    def of(values: dict[str, Any]) -> dict[str, Any]:
        return identity(switched, DataSection(chat_template_kwargs=values))

    assert of(QUIET) == {**of({}), "chat_template_kwargs": QUIET} != of({"enable_thinking": True})


def test_unknown_variable_is_refused(switched: Target) -> None:
    with pytest.raises(UserError, match="no variable 'enable_thinkin'"):
        with_template_kwargs(switched.tokenizer, {"enable_thinkin": False})
    with pytest.raises(UserError, match="no chat template"):
        with_template_kwargs(tiny_tokenizer(None), QUIET)
    mentioned = tiny_tokenizer("{# enable_thinking #}{{ 'enable_thinking: ' }}" + CHATML)
    with pytest.raises(UserError, match="no variable 'enable_thinking'"):
        with_template_kwargs(mentioned, QUIET)


@pytest.mark.parametrize(
    "template", [SWITCH, "{%- generation -%}" + SWITCH + "{% endgeneration %}", {"default": CHATML, "think": SWITCH}]
)
def test_variables_are_found(template: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert has_variable(tokenizer, "enable_thinking") and not has_variable(tokenizer, "m")


def test_a_malformed_template_is_named() -> None:
    broken = tiny_tokenizer("{% if enable_thinking %}" + CHATML)
    with pytest.raises(UserError, match=r"chat template refuses.*endif"):
        prompt_tokens([{"role": "user", "content": "Hi"}], with_template_kwargs(broken, QUIET))


def chats(count: int, **answer: Any) -> list[dict[str, Any]]:
    """Conversations of one turn."""
    return [
        {"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "Ho", **answer}]}
        for i in range(count)
    ]


def given(target: Target, rows: list[dict[str, Any]], folder: Path, **over: Any) -> tuple[list[Conversation], str]:
    """Build conversations with the given answers; return them and the console's text."""
    data = {"prompts": write_rows(folder / "p.jsonl", *rows), "regenerate": False, **SIZES, "conversations": 20, **over}
    console = Console(file=io.StringIO(), width=300)
    splits = build_conversations(target, DataSection.model_validate(data), folder / "data", console)
    assert isinstance(console.file, io.StringIO)
    return [*splits.train, *splits.validation], console.file.getvalue()


def test_reasoning_is_rendered_and_learned(tiny_target: Target, tmp_path: Path) -> None:
    target = Target(tiny_target.model, tiny_tokenizer(REASONS), "reasons")
    # The reasoning contains the text of the answer.
    found, _ = given(target, chats(12, reasoning_content="Ho or hum?"), tmp_path)
    for item in found:
        learned = [token for token, mine in zip(item.tokens, item.supervised, strict=True) if mine]
        assert target.tokenizer.decode(learned) == "<think>Ho or hum?</think>Ho<|im_end|>"
        assert Conversation.from_json(json.loads(json.dumps(item.to_json()))) == item


def test_unrendered_reasoning_is_left_out_and_counted(tiny_target: Target, tmp_path: Path) -> None:
    rows = [*chats(12), *({**row, "id": "r"} for row in chats(15, reasoning_content="Hm.")[12:])]
    found, told = given(tiny_target, rows, tmp_path, heldout=0)
    assert "r" not in {item.id for item in found} and len(found) == 12
    assert "Left out: 3 with reasoning that the chat template does not render." in told
    target = Target(tiny_target.model, tiny_tokenizer(REASONS), "reasons")
    earlier = chats(15, reasoning_content="Hm.")[12:]
    for row in earlier:
        row["messages"] += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No"}]
    (tmp_path / "earlier").mkdir()
    _, told = given(target, [*chats(12), *earlier], tmp_path / "earlier", heldout=0)
    assert "Left out: 3 earlier answers that the chat template rewrites." in told


TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ '<|im_start|>user\n<result>' + m['content'] + '</result><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<|im_start|>' + call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A call begins with a special token, as in Llama and Mistral."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}


def agents(count: int) -> list[dict[str, Any]]:
    """Conversations with a tool call, its result and a final answer."""
    return [
        {
            "tools": [WEATHER],
            "messages": [
                {"role": "user", "content": f"Rain {i}?"},
                {"role": "assistant", "content": "Hm", "tool_calls": [CALL]},
                {"role": "tool", "content": "dry"},
                {"role": "assistant", "content": "No"},
            ],
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("thinks", [False, True])
def test_given_tool_calls_are_learned_and_results_read(tiny_target: Target, tmp_path: Path, thinks: bool) -> None:
    """Some templates put an empty thinking block before the last answer only."""
    block = "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
    template = TOOLS.replace("'\n' + m['content'] }}", "'\n' }}" + block) if thinks else TOOLS
    assert (template != TOOLS) == thinks
    target = Target(tiny_target.model, tiny_tokenizer(template), "calls")
    found, told = given(target, agents(9), tmp_path, heldout=0)
    assert len(found) == 9 and "the chat template" not in told
    for item in found:
        text = target.tokenizer.decode(item.tokens)
        assert text.startswith('<|im_start|>system\n{"type": "function"') and "<result>dry</result>" in text
        learned = [target.tokenizer.decode(item.tokens[first:stop]) for first, stop in item.supervised_spans]
        call = '<|im_start|>{"name": "weather", "arguments": {"city": "Bonn"}}'
        assert learned == [f"Hm{call}<|im_end|>", "No<|im_end|>"]
        assert item.tools == [WEATHER]
        assert Conversation.from_json(json.loads(json.dumps(item.to_json()))) == item


def test_target_answers_up_to_its_first_tool_call(tiny_target: Target, tmp_path: Path) -> None:
    """A given result belongs to a given call."""
    target = Target(tiny_target.model, tiny_tokenizer(TOOLS), "calls")
    found, told = given(target, agents(9), tmp_path, heldout=0, regenerate=True)
    assert len(found) == 9 and "the chat template" not in told
    for item in found:
        assert target.tokenizer.decode(item.tokens).startswith('<|im_start|>system\n{"type": "function"')
        assert len(item.supervised_spans) == 1 and "dry" not in target.tokenizer.decode(item.tokens)
        assert [message["role"] for message in item.messages] == ["user", "assistant"]


def test_unrendered_tools_are_left_out_and_counted(tiny_target: Target, tmp_path: Path) -> None:
    _, told = given(tiny_target, [*chats(12), *agents(3)], tmp_path, heldout=0)
    assert "Left out: 3 with tools that the chat template does not render." in told
    no_results = TOOLS.replace("'<|im_start|>user\n<result>' + m['content'] + '</result><|im_end|>\n'", "''")
    target = Target(tiny_target.model, tiny_tokenizer(no_results), "calls")
    (tmp_path / "results").mkdir()
    _, told = given(target, [*chats(12), *agents(3)], tmp_path / "results", heldout=0)
    assert "Left out: 3 with tool results that the chat template does not render." in told


def test_unrendered_calls_are_left_out_and_counted(tiny_target: Target, tmp_path: Path) -> None:
    rows = [*chats(12), *chats(15, tool_calls=[CALL])[12:]]
    found, told = given(tiny_target, rows, tmp_path, heldout=0)
    assert len(found) == 12
    assert "Left out: 3 with tool calls that the chat template does not render." in told
    (tmp_path / "own").mkdir()
    found, told = given(tiny_target, rows, tmp_path / "own", heldout=0, regenerate=True)
    assert len(found) == 15 and "the chat template" not in told, "the target's own answers call none"
