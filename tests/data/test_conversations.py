"""The supervision mask covers exactly the assistant's text, for many styles of chat template."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation, read_conversations, write_conversations
from headstart.data.prompts.chat import prompt_tokens, render
from headstart.errors import UserError
from tests.data.loading import turns
from tests.tiny import CHATML, tiny_tokenizer

INST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<s>[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
DROPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_THINKING = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
EMPTY_THINKING_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def inst_tokenizer() -> Any:
    return tiny_tokenizer(INST, special=("<unk>", "<s>", "</s>"))


def supervised_text(tokenizer: Any, tokens: list[int], supervised: list[bool]) -> list[str]:
    conversation = Conversation("x", tokens, supervised, [])
    return [tokenizer.decode(tokens[start:stop]) for start, stop in conversation.supervised_spans]


CHAT = tiny_tokenizer()
SUPERVISED: dict[str, tuple[Any, list[dict[str, str]], list[str]]] = {
    "chatml": (CHAT, turns("Hi", "Hello."), ["Hello.<|im_end|>"]),
    "chatml with a system message, two turns": (
        CHAT, turns("Hi", "Hello.", "And é?", "日本 ☃\n\n", system="Be brief."),
        ["Hello.<|im_end|>", "日本 ☃\n\n<|im_end|>"],
    ),
    "answer starts with blanks": (CHAT, turns("Hi", "\n Hello"), ["\n Hello<|im_end|>"]),
    "an empty answer is its end of turn": (CHAT, turns("Hi", ""), ["<|im_end|>"]),
    "answer that repeats markup": (
        CHAT, turns("Say user", "user", "user", "im_end"), ["user<|im_end|>", "im_end<|im_end|>"],
    ),
    "[INST]": (inst_tokenizer(), turns("Hi", "Hello."), [" Hello. </s>"]),
    "[INST], two turns": (inst_tokenizer(), turns("a", " b ", "c", "d", system="s"), [" b </s>", " d </s>"]),
    "default system prompt": (
        tiny_tokenizer(DEFAULT_SYSTEM + CHATML), turns("a", "b", "c", "d"), ["b<|im_end|>", "d<|im_end|>"],
    ),
    "thinking in the last turn only": (
        tiny_tokenizer(DROPS_THINKING), turns("a", "plain", "c", "<think>hm</think>d"),
        ["plain<|im_end|>", "<think>hm</think>d<|im_end|>"],
    ),
    "the template writes an empty thinking block": (
        tiny_tokenizer(EMPTY_THINKING_LAST), turns("a", "b", "c", "d"), ["b<|im_end|>", "d<|im_end|>"],
    ),
    "no end-of-turn token": (tiny_tokenizer(PLAIN), turns("a", "Hello.", "b", "Bye."), ["Hello.", "Bye."]),
}  # fmt: skip


@pytest.mark.parametrize("case", SUPERVISED)
def test_supervises_answers_and_their_end_of_turn(case: str) -> None:
    tokenizer, messages, spans = SUPERVISED[case]
    tokens, supervised = encode(messages, tokenizer)
    assert tokenizer.decode(tokens) == render(messages, tokenizer, answer=False)
    assert supervised_text(tokenizer, tokens, supervised) == spans


def test_rewritten_answer_is_not_supervised() -> None:
    tokenizer = tiny_tokenizer(DROPS_THINKING)
    tokens, supervised = encode(turns("a", "<think>hm</think>b", "c", "d"), tokenizer)
    assert supervised_text(tokenizer, tokens, supervised) == ["d<|im_end|>"]


def test_mask_by_hand() -> None:
    """<|im_start|> user Ċ H i <|im_end|> Ċ <|im_start|> assistant Ċ O k <|im_end|> Ċ"""
    tokenizer = tiny_tokenizer()
    tokens, supervised = encode(turns("Hi", "Ok"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokens) == [
        *("<|im_start|>", "user", "Ċ", "H", "i", "<|im_end|>", "Ċ"),
        *("<|im_start|>", "assistant", "Ċ", "O", "k", "<|im_end|>", "Ċ"),
    ]
    assert [int(flag) for flag in supervised] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_supervised_tokens_are_the_answers() -> None:
    """Random texts: the supervised tokens decode to each answer and its end of turn, in order."""
    tokenizer = tiny_tokenizer()
    rng = random.Random(0)
    for _ in range(200):
        texts = ["".join(rng.choices("aeé日☃👋🏽 \n\t.<|", k=rng.randrange(9))) for _ in range(rng.choice((2, 4, 6)))]
        tokens, supervised = encode(turns(*texts), tokenizer)
        written = tokenizer.decode([token for token, flag in zip(tokens, supervised, strict=True) if flag])
        assert written == "".join(answer + "<|im_end|>" for answer in texts[1::2])


def test_prompt_tokens_end_where_the_answer_begins() -> None:
    tokenizer = tiny_tokenizer()
    tokens, supervised = encode(turns("Hi", "Hello."), tokenizer)
    assert prompt_tokens(turns("Hi"), tokenizer) == tokens[: supervised.index(True)]


def test_trimmed_offsets_do_not_move_the_mask() -> None:
    """Some byte-level tokenizers report a line break as an empty token after itself."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    plain = encode(turns("Hi", "Hello.", "b", " c"), tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert encode(turns("Hi", "Hello.", "b", " c"), tokenizer) == plain


def test_token_across_the_border_is_not_supervised() -> None:
    """'ASSISTANT: ' + 'a cat' becomes ':', 'Ġa', ...; the target never writes 'Ġa' after this prompt."""
    tokenizer = tiny_tokenizer(PLAIN)
    tokens, supervised = encode(turns("a", "a cat"), tokenizer)
    assert "Ġa" in tokenizer.convert_ids_to_tokens(tokens)
    assert supervised_text(tokenizer, tokens, supervised) == [" cat"]


class TestRefusals:
    def test_no_template(self) -> None:
        for tokenizer in (tiny_tokenizer(None), None):
            with pytest.raises(UserError, match="no chat template"):
                encode(turns("a", "b"), tokenizer)

    def test_nothing_supervised(self) -> None:
        with pytest.raises(UserError, match="Nothing is supervised in a conversation of 1 messages"):
            encode(turns("Hi"), tiny_tokenizer())
        with pytest.raises(UserError, match="Nothing is supervised"):
            encode(turns("Hi", ""), tiny_tokenizer(PLAIN))

    def test_generation_prompt_that_is_not_in_the_conversation(self) -> None:
        tokenizer = tiny_tokenizer(OPENS_THINKING)
        with pytest.raises(UserError, match=r"rewrites each answer.*data.regenerate=true"):
            encode(turns("a", "b"), tokenizer)

    def test_roles_that_the_template_refuses(self) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        with pytest.raises(UserError, match="roles user, user: Roles must alternate"):
            prompt_tokens(messages, inst_tokenizer())

    def test_assistant_first(self) -> None:
        with pytest.raises(UserError, match="starts with the assistant"):
            encode([{"role": "assistant", "content": "Hi"}, *turns("a", "b")], tiny_tokenizer())

    def test_slow_tokenizer(self) -> None:
        class Slow:
            chat_template = CHATML
            is_fast = False

            def apply_chat_template(self, *_args: Any, **_kwargs: Any) -> str:
                return "text"

        with pytest.raises(UserError, match=r"Slow has no character offsets.*fast tokenizer"):
            encode(turns("a", "b"), Slow())


class TestFiles:
    def test_round_trip(self, tmp_path: Path) -> None:
        tokens, supervised = encode(turns("Hi é", "Hello.", "b", "c"), tiny_tokenizer())
        given = [
            Conversation("a", tokens, supervised, turns("Hi é", "Hello.", "b", "c"), "chat", {"temperature": 0.5}),
            Conversation("b", [1, 2], [False, False], turns("Hi")),
        ]
        write_conversations(tmp_path / "c.jsonl", given)
        assert read_conversations(tmp_path / "c.jsonl") == given

    def test_reading_takes_five_bytes_per_token(self, tmp_path: Path) -> None:
        """A million conversations have half a billion tokens."""
        count, length = 40, 2000
        row = {"id": "a", "tokens": list(range(1000, 1000 + length)), "supervised": [[9, length]], "messages": []}
        (tmp_path / "c.jsonl").write_text((json.dumps(row) + "\n") * count)
        read_conversations(tmp_path / "c.jsonl")  # warm up caches of the first call
        tracemalloc.start()
        kept = read_conversations(tmp_path / "c.jsonl")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kept) == count and held < 5.1 * count * length + 2000 * count

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"id": "b"}', "no 'tokens'"),
            ('{"id": "b", "tokens": [1], "supervised": [[0, 2]], "messages": []}', "run .0, 2. of 1 tokens"),
            ('{"id": "b", "tokens": 3, "supervised": [], "messages": []}', "not iterable"),
            ('{"id": "b", "tok', "not valid JSON"),
        ],
    )
    def test_malformed_line(self, tmp_path: Path, line: str, reason: str) -> None:
        path = tmp_path / "c.jsonl"
        write_conversations(path, [Conversation("a", [1], [True], [])])
        path.write_text(path.read_text() + line)
        with pytest.raises(UserError, match=rf"c\.jsonl, line 2: .*{reason}"):
            read_conversations(path)
