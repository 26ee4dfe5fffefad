"""Published styles of chat templates: tool calls, thinking blocks, channels, and end-of-turn tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.conversations.answers import AnswerGenerator
from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import prompt_tokens, with_template_kwargs, with_tools
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.shapes import Prompt, parse_prompt
from headstart.data.served.reading import read_log
from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from tests.data.loading import turns, write_rows
from tests.tiny import tiny_tokenizer

TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<call>' + CALL }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = {
    "tojson": "call['function'] | tojson",
    "concatenates": "call['function']['name'] + ' ' + call['function']['arguments']",
    "prints": "call['function']['name'] ~ ' ' ~ call['function']['arguments']",
}
WRITTEN = {"tojson": '{"name": "rain", "arguments": {"city": "Köln"}}'}
WEATHER = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}


def with_template(target: Target, template: str, special: tuple[str, ...] = ()) -> Target:
    return Target(target.model, tiny_tokenizer(template, *([special] if special else [])), "templated")


def read_everywhere(target: Target, messages: list[dict[str, Any]], folder: Path) -> set[str]:
    """Return the prompt texts that a data file, a decoder and an engine's log make of the same messages."""
    tokenizer = target.tokenizer
    prompt = parse_prompt({"messages": messages, "tools": [WEATHER]}, "1")
    folder.mkdir(exist_ok=True)
    reply = {"choices": [{"finish_reason": "stop", "message": {"content": "It is dry."}}], "created": 7}
    request = {"messages": messages, "tools": [WEATHER]}
    (folder / "log.jsonl").write_text(json.dumps({"request": request, "response": reply}) + "\n")
    (served,), left_out = read_log(folder, target)
    assert not left_out.counts
    read = (
        prompt_tokens(prompt.messages, with_tools(tokenizer, prompt.tools)),
        Decoder(target).tokens(messages, tools=[WEATHER]),
        served.prompt,
    )
    return {tokenizer.decode(tokens) for tokens in read}


@pytest.mark.parametrize("template", CALLS)
@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}])
def test_messages_are_read_alike_everywhere(tiny_target: Target, tmp_path: Path, template: str, arguments: Any) -> None:
    """Arguments of calls are text or objects, contents are null or lists of parts, and developer messages are system
    messages."""
    target = with_template(tiny_target, TOOLS.replace("CALL", CALLS[template]))
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "dry", "tool_call_id": "1"},
    ]
    written = WRITTEN.get(template, 'rain {"city": "Köln"}')
    assert read_everywhere(target, messages, tmp_path) == {
        f"{json.dumps(WEATHER)}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\n<call>{written}<|im_end|>\n<|im_start|>tool\ndry<|im_end|>\n<|im_start|>assistant\n"
    }
    assert arguments == messages[2]["tool_calls"][0]["function"]["arguments"], "the caller's own stay as they are"


def test_invalid_utf8_is_named_or_counted(tiny_target: Target, tmp_path: Path) -> None:
    target = with_template(tiny_target, TOOLS.replace("CALL", CALLS["tojson"]))
    decoder, asked, half = Decoder(target), [{"role": "user", "content": "Hi"}], "\ud800"
    for messages, tools, name in (
        ([{"role": "user", "content": half}], [], "messages"),
        (asked, [{**WEATHER, "description": half}], "tools"),
    ):
        with pytest.raises(UserError, match=f"^{name} holds text that is not UTF-8: '.ud800'"):
            decoder.tokens(messages, tools=tools)
    reply = {"choices": [{"finish_reason": "stop", "message": {"content": "It is dry."}}], "created": 7}
    broken = {"choices": [{"finish_reason": "stop", "message": {"content": f"It is{half} dry."}}], "created": 7}
    rows = [
        {"request": {"messages": asked}, "response": reply},
        {"request": {"messages": asked}, "response": broken},
        {"request": {"messages": [{"role": "user", "content": half}]}, "response": reply},
        {"request": {"messages": asked, "tools": [{**WEATHER, "name": half}]}, "response": reply},
        {"request": {"messages": asked, "user": half}, "response": reply},
        {"request": {"prompt": f"Rain {half}"}, "response": reply},
    ]
    write_rows(tmp_path / "log.jsonl", *rows)
    served, left_out = read_log(tmp_path, target)
    assert len(served) == 1 and left_out.counts == {"with text that is not UTF-8": 5}


# -- supervised tokens -------------------------------------------------------------------------------------------------

THINKS = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.asked and (loop.last or m['reasoning_content']) %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ '\n<call>' + call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""As in Qwen3: answers to the last question keep their thinking block, and the last answer gets an empty one."""
HARMONY = ("<|pad|>", "<|start|>", "<|call|>", "<|message|>", "<|channel|>", "<|end|>", "<|format|>", "<|return|>")
CHANNELS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""As in gpt-oss: an answer has channels, and its last token differs once another turn follows."""
TURNS = ("<pad>", "<start_of_turn>", "<end_of_turn>", "<eos>")
ENDS_TURNS = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""As in Gemma: turns do not end with the tokenizer's EOS."""


def learned(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    tokens, supervised = encode(messages, tokenizer)
    spans = Conversation("x", tokens, supervised, []).supervised_spans
    return [tokenizer.decode(tokens[start:stop]) for start, stop in spans]


def test_template_thinking_block_is_not_supervised() -> None:
    tokenizer = tiny_tokenizer(THINKS)
    quiet = with_template_kwargs(tokenizer, {"enable_thinking": False})
    asked = turns("Hi", "Ho", "And?", "think")
    assert learned(tokenizer, asked) == ["Ho<|im_end|>", "think<|im_end|>"]
    assert learned(quiet, asked) == ["think<|im_end|>"], "the prompt of the first answer is rewritten later"
    thought = [*asked[:3], {**asked[3], "reasoning_content": "Hm."}]
    assert learned(tokenizer, thought)[1] == "<think>\nHm.\n</think>\n\nthink<|im_end|>"
    calls = [*asked[:3], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "rain"}}]}]
    assert learned(tokenizer, calls)[1] == '\n<call>{"name": "rain"}<|im_end|>'


def test_only_the_targets_end_token_is_supervised() -> None:
    tokenizer = tiny_tokenizer(CHANNELS, HARMONY)
    assert learned(tokenizer, turns("Hi", "Ho", "And?", "No")) == ["Ho", "No<|return|>"]
    assert learned(tiny_tokenizer(ENDS_TURNS, TURNS), turns("Hi", " Ho")) == ["Ho<end_of_turn>"]


# -- channels and end-of-turn tokens -----------------------------------------------------------------------------------


def harmony(target: Target, written: str) -> tuple[Decoder, Any]:
    """Return a decoder and a logits processor that forces the given text."""
    templated = with_template(target, CHANNELS, HARMONY)
    tokens = templated.tokenizer.encode(written)

    def forced(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = ids.shape[1] - length
        return scores.index_fill(1, torch.tensor([tokens[place]]), 1e9)

    decoder = Decoder(templated)
    length = len(decoder.tokens("Hi"))
    return decoder, forced


THOUGHT = "<|channel|>analysis<|message|>Final? Say hi.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (f"{THOUGHT}Hello é!<|return|>", "Hello é!"),
        ("<|channel|>final<|message|>Hello!<|return|>", "Hello!"),
        (f"{THOUGHT}One.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>", "One.Two."),
        ("<|channel|>final <|format|>json<|message|>{}<|return|>", "{}"),
        (THOUGHT[:40], THOUGHT[:40]),
        ("Hello<|end|>!<|return|>", "Hello!"),
    ],
    ids=["after an analysis", "at once", "twice", "with a format", "cut before the answer", "without channels"],
)
def test_answer_text_is_the_final_channel(tiny_target: Target, written: str, text: str) -> None:
    decoder, forced = harmony(tiny_target, written)
    count = len(decoder.target.tokenizer.encode(written))
    options: dict[str, Any] = {"processors": [forced], "max_new_tokens": count, "drafter": "none"}
    assert decoder.generate("Hi", **options).text == text
    stream = decoder.stream("Hi", **options)
    assert "".join(stream) == text and stream.answer is not None and stream.answer.text == text


def test_stop_strings_match_in_the_text(tiny_target: Target) -> None:
    decoder, forced = harmony(tiny_target, f"{THOUGHT}Say hi.<|return|>")
    options: dict[str, Any] = {"processors": [forced], "max_new_tokens": 200, "drafter": "none"}
    for stop, finish, text in (("final", "end", "Say hi."), ("hi", "stop", "Say hi"), ("<|end|>", "stop", "")):
        answer = decoder.generate("Hi", stop=stop, **options)
        assert answer.finish_reason == finish and answer.text.endswith(text)
    assert answer.text == "<|channel|>analysis<|message|>Final? Say hi.<|end|>"


def test_rewritten_turns_are_counted(tiny_target: Target) -> None:
    for template, special in ((CHANNELS, HARMONY), (THINKS, ())):
        target, left_out = with_template(tiny_target, template, special), LeftOut()
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(vars(target), "end_tokens", frozenset(range(20, 200)))
            prompts = [Prompt(turns("Hi")), Prompt([*turns("Ho"), *turns("And?")])]
            found = AnswerGenerator(target, DataSection(prompts="x", max_new_tokens=20)).answer(
                prompts, 0, 0.0, left_out
            )
        assert [len(item.messages) for item in found] == [2, 2]
        assert left_out.counts == {"later turns at which the chat template rewrites the answers before them": 1}


def test_logged_text_ends_its_turn_as_the_template_does(tiny_target: Target, tmp_path: Path) -> None:
    target = with_template(tiny_target, ENDS_TURNS, TURNS)
    reply = {"choices": [{"finish_reason": "stop", "message": {"content": "It is dry."}}], "created": 7}
    (tmp_path / "log.jsonl").write_text(json.dumps({"request": {"messages": turns("Hi")}, "response": reply}))
    (served,), _ = read_log(tmp_path, target)
    assert target.tokenizer.decode(served.answer) == "It is dry.<end_of_turn>"
