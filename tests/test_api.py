"""`headstart.load` and what it returns."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor

import headstart
from headstart.api import Decoder
from headstart.decode.loop import DecodeLoop
from headstart.decode.texts import Generation, Round
from headstart.drafters import catalog
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.hub.format import export_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.support.detokenizer import IncrementalDetokenizer
from headstart.tree.tree import TreeShape
from tests.forks import Forks
from tests.hub.helpers import TUNING, export, make_heads
from tests.replay.test_chains import hybrid
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["Hello there", "Why is the sky blue?", "a"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Decoder:
    folder = tmp_path_factory.mktemp("api") / "heads"
    export(folder, tiny_target)
    loaded = headstart.load(folder, target=tiny_target)
    assert isinstance(loaded, Decoder)
    return loaded


def test_import_alone_is_light() -> None:
    code = "import sys, headstart; assert headstart.__version__; assert 'torch' not in sys.modules; headstart.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'headstart' has no attribute 'nothing'" in done.stderr


def test_load_takes_the_folder_of_a_run(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\nheads: {}\n")
    with pytest.raises(UserError, match="has no heads yet"):
        headstart.load(tmp_path, target=tiny_target)
    made = export(tmp_path / "heads", tiny_target)
    loaded = headstart.load(tmp_path, target=tiny_target).heads.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in made.state_dict().items())


def test_load_finds_the_target_of_the_heads(tmp_path: Path, tiny_target: Target, tiny_target_folder: Path) -> None:
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    loaded = headstart.load(str(tmp_path / "heads"), dtype="bfloat16", device="cpu")
    assert loaded.target.dtype == torch.bfloat16
    assert {p.dtype for p in loaded.heads.parameters()} == {torch.bfloat16}
    assert loaded.generate("Hi", max_new_tokens=6).tokens
    named = headstart.load(tmp_path / "heads", target=str(tiny_target_folder), dtype="float32")
    assert named.target.dtype == torch.float32


def test_load_takes_the_dtypes_of_torch(tiny_target_folder: Path) -> None:
    folder: Any = str(tiny_target_folder)
    assert headstart.load(target=folder, dtype=torch.bfloat16, device="cpu").target.dtype == torch.bfloat16
    for wrong, message in ((torch.float64, "Unknown dtype 'float64'"), (16, "dtype is 16"), (None, "dtype is None")):
        with pytest.raises(UserError, match=message):
            headstart.load(target=folder, dtype=wrong)
    with pytest.raises(UserError, match=r"Unknown dtype torch.bfloat16. Did you mean 'bfloat16'"):
        load_target(folder, torch.bfloat16)  # type: ignore[arg-type]  # wrong on purpose


def test_load_refuses(tmp_path: Path, tiny_target: Target) -> None:
    export(tmp_path / "heads", tiny_target)
    other = Target(tiny_model("llama", seed=1, vocab_size=tiny_target.vocab_size), None, "other-model")
    export(tmp_path / "moved", Target(tiny_target.model, tiny_target.tokenizer, "/nowhere/model"))
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("heads", {"target": other}, "another model"),
        ("heads", {"target": tiny_target, "dtype": "bfloat16"}, "already loaded"),
        ("heads", {}, "Unknown target 'tiny'"),
        ("none", {}, "No folder"),
        ("moved", {}, r"not on this machine.*Say where"),
    ]
    for folder, options, message in refused:
        with pytest.raises(UserError, match=message):
            headstart.load(tmp_path / folder, **options)


def test_generate_is_lossless_and_counts(decoder: Decoder) -> None:
    for prompt in PROMPTS:
        plain = decoder.generate(prompt, max_new_tokens=24, drafter="none")
        fast = decoder.generate(prompt, max_new_tokens=24)
        assert fast.tokens == plain.tokens
        assert fast.text == plain.text
        assert fast.finish_reason in ("end", "length")
        assert plain.tokens_per_round == 1.0
        assert fast.drafter_error is None


def test_the_figures_of_an_answer(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens in two rounds, the last one 40 ms after the call."""
    rounds = [Round(4, 2, 1.0, 8.0, 1.0), Round(4, 1, 1.0, 8.0, 1.0)]
    made = Generation([70, 71, 72, 73], "length", [10.0, 30.0, 30.0, 40.0], rounds)
    monkeypatch.setattr(DecodeLoop, "generate", lambda *_: [made])
    answer = decoder.generate("Hello")
    assert (answer.tokens, answer.finish_reason, answer.first_token_ms) == ([70, 71, 72, 73], "length", 10.0)
    assert answer.tokens_per_second == pytest.approx(100.0)
    assert answer.tokens_per_round == 1.5
    assert answer.text == decoder.target.tokenizer.decode([70, 71, 72, 73])


@pytest.mark.parametrize(
    "drafter", ["heads", "ngram", "lookahead", "early-exit:1", "heads+ngram", "heads+ngram+memory", "none"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"presence_penalty": 1.5, "logit_bias": {40: 2.0}},
        {"processors": [MinNewTokensLengthLogitsProcessor(3, 8, 2)]},
        {"draft": "on"},
    ],
)
def test_every_drafter_writes_the_same_words(decoder: Decoder, drafter: str, options: dict[str, Any]) -> None:
    plain = decoder.generate("one two one two", max_new_tokens=16, **{**options, "draft": "off"})
    assert decoder.generate("one two one two", max_new_tokens=16, drafter=drafter, **options).tokens == plain.tokens


def test_sampling_settings_reach_the_loop(decoder: Decoder) -> None:
    greedy = decoder.generate("Hello", max_new_tokens=8).tokens
    for only_the_best in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        for verifier in ("auto", "top_k", "greedy_draft"):
            answer = decoder.generate("Hello", max_new_tokens=8, temperature=1.0, verifier=verifier, **only_the_best)
            assert answer.tokens == greedy, (only_the_best, verifier)
    sampled = decoder.generate("Hello", max_new_tokens=8, temperature=1.0, seed=5)
    assert sampled.tokens != greedy
    assert sampled.tokens == decoder.generate("Hello", max_new_tokens=8, temperature=1.0, seed=5).tokens


def test_sampling_is_random_unless_seeded_and_every_answer_can_be_repeated(decoder: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    answers = [decoder.generate("Hello", **options) for _ in range(4)]
    assert len({tuple(answer.tokens) for answer in answers}) > 1 and len({answer.seed for answer in answers}) == 4
    again = decoder.generate("Hello", **options, seed=answers[0].seed)
    assert (again.tokens, again.seed) == (answers[0].tokens, answers[0].seed)
    stream = decoder.stream("Hello", **options)
    list(stream)
    assert stream.answer is not None and stream.answer.seed is not None
    assert decoder.generate("Hello", **options, seed=stream.answer.seed).tokens == stream.answer.tokens
    first, second = decoder.generate_batch(PROMPTS[:2], **options, draft="on")
    assert first.seed is not None and second.seed == first.seed + 1
    assert decoder.generate(PROMPTS[1], **options, draft="on", seed=second.seed).tokens == second.tokens
    assert decoder.generate("Hello", max_new_tokens=4, seed=5).seed is None, "greedy text has none"


def test_answers_have_logprobs_if_asked(decoder: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "logprobs": 2}
    answer = decoder.generate("one two one two", **options)
    plain = decoder.generate("one two one two", **options, drafter="none")
    stream = decoder.stream("one two one two", **options)
    list(stream)
    assert stream.answer is not None and answer.logprobs and plain.logprobs and stream.answer.logprobs
    assert [next(iter(one)) for one in answer.logprobs] == answer.tokens == plain.tokens
    for ours, streamed, theirs in zip(answer.logprobs, stream.answer.logprobs, plain.logprobs, strict=True):
        assert len(ours) == 2 and sum(map(math.exp, ours.values())) < 1
        assert ours == streamed == pytest.approx(theirs, abs=1e-5)  # float32 products sum in another order
    assert decoder.generate("Hello", max_new_tokens=4).logprobs is None


def test_kinds_of_trees(tiny_target: Target) -> None:
    heads, shape = make_heads(tiny_target), TreeShape.from_paths(TUNING["paths"])
    measured = {"chain": 1, "calibration": {"log_probs": [[-5.0, 0.0]] * 2, "accepted": [[0.1, 0.9]] * 2}}
    tuned = Decoder(tiny_target, heads, shape, {**TUNING, **measured, "tree": "dynamic"})
    kinds = {tree: tuned.drafters("heads", tree) for tree in ("dynamic", "static", "chain", None)}
    assert {tree: drafter.tree for tree, (drafter,) in kinds.items() if isinstance(drafter, HeadDrafter)} == {
        "dynamic": "dynamic", "static": "static", "chain": "static", None: "dynamic",
    }  # fmt: skip
    assert kinds["chain"][0].max_nodes == 2
    assert tuned.costs is not None and tuned.costs.node_counts == (1, 2, 4)
    assert tuned.loop("heads", "chain") is tuned.loop("heads", "chain"), "made once"
    words = {tuple(tuned.generate("Hello", max_new_tokens=12, tree=tree).tokens) for tree in kinds}
    assert len(words) == 1
    untuned = Decoder(tiny_target, heads, shape)
    assert untuned.costs is None
    (alone,) = untuned.drafters()
    assert isinstance(alone, HeadDrafter) and (alone.tree, alone.max_nodes) == ("static", shape.size)
    with pytest.raises(UserError, match=r"Tuning.paths: Field required"):
        Decoder(tiny_target, heads, shape, {"node_counts": [1]})


@pytest.mark.drafter_fails
def test_a_drafter_that_fails_is_named_in_the_answer(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make_heads(tiny_target)
    decoder = Decoder(tiny_target, heads, TreeShape.from_paths(TUNING["paths"]), TUNING)
    plain = decoder.generate("Hello", max_new_tokens=8, drafter="none")
    assert plain.drafter_error is None

    def fail(*_: Any) -> None:
        raise ValueError("no drafts today")

    monkeypatch.setattr("headstart.drafters.heads.HeadDrafter.propose", fail)
    answer = decoder.generate("Hello", max_new_tokens=8)
    assert (answer.tokens, answer.drafter_error) == (plain.tokens, "ValueError: no drafts today")
    options: dict[str, Any] = {"max_new_tokens": 8, "draft": "on"}
    for call in (
        lambda: decoder.generate("Hello", **options),
        lambda: decoder.generate_batch(PROMPTS, **options),
        lambda: list(decoder.stream("Hello", **options)),
    ):
        with pytest.warns(RuntimeWarning) as warned:
            call()
        told = [(str(warning.message), warning.filename) for warning in warned]
        problem = "A drafter failed (ValueError: no drafts today); decoding went on without it."
        assert told == [(problem, __file__)], "once a call, at the line that made it"


def test_an_answer_says_where_drafting_did_not_pay(tiny_target: Target) -> None:
    heads, shape = make_heads(tiny_target), TreeShape.from_paths(TUNING["paths"])
    dear = Decoder(tiny_target, heads, shape, {**TUNING, "draft_ms": 50.0, "verify_ms": (1.0, 30.0, 60.0)})
    answer = dear.generate("Hello", max_new_tokens=24, drafter="heads")
    assert answer.rounds == 23 and 0 < answer.paused_rounds <= 23
    for options in ({"drafter": "none"}, {"draft": "off"}, {"draft": "on"}):
        assert dear.generate("Hello", **{"max_new_tokens": 8, "drafter": "heads", **options}).paused_rounds == 0  # type: ignore[arg-type]
    never = Decoder(tiny_target, heads, TreeShape.chain(0))  # tuning found no tree that pays
    answer = never.generate("Hello", max_new_tokens=8, drafter="heads")
    assert answer.paused_rounds == answer.rounds == 7


def test_batch_equals_one_by_one(decoder: Decoder) -> None:
    one = [decoder.generate(prompt, max_new_tokens=16).tokens for prompt in PROMPTS]
    assert [answer.tokens for answer in decoder.generate_batch(PROMPTS, max_new_tokens=16)] == one
    sampled = decoder.generate_batch(PROMPTS, max_new_tokens=8, temperature=1.0, seed=3, draft="on")
    alone = decoder.generate(PROMPTS[1], max_new_tokens=8, temperature=1.0, seed=4, draft="on")
    assert sampled[1].tokens == alone.tokens


def test_the_three_kinds_of_prompt(decoder: Decoder) -> None:
    tokenizer = decoder.target.tokenizer
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer.encode(rendered)
    assert decoder.tokens("Hello") == expected
    assert decoder.tokens([{"role": "user", "content": "Hello"}]) == expected
    assert decoder.tokens(expected) == expected
    assert decoder.tokens("Hello", raw=True) == tokenizer.encode("Hello")
    assert decoder.generate(expected, max_new_tokens=8).tokens == decoder.generate("Hello", max_new_tokens=8).tokens


def test_a_content_may_be_a_list_of_texts(decoder: Decoder) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    assert decoder.tokens([{"role": "user", "content": parts}]) == decoder.tokens("Hello")
    system, developer = (
        [{"role": role, "content": "be brief"}, {"role": "user", "content": parts}] for role in ("system", "developer")
    )
    assert decoder.tokens(system) == decoder.tokens(developer) != decoder.tokens("Hello")


def test_a_stop_string_may_hold_special_tokens(decoder: Decoder) -> None:
    def always_1(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([1]), 1e9)

    options: dict[str, Any] = {"processors": [always_1], "max_new_tokens": 4}
    stopped = decoder.generate("Hello", stop="<|im_start|><|im_start|>", **options)
    assert (stopped.tokens, stopped.finish_reason, stopped.text) == ([1, 1], "stop", "")
    assert decoder.generate("Hello", stop=["im_start", "x"], **options).finish_reason == "length", "no text is shown"


@pytest.mark.parametrize("prompts", ["Hi", b"Hi", {"role": "user", "content": "Hi"}, None, 5])
def test_a_batch_is_a_list_of_prompts(decoder: Decoder, prompts: Any) -> None:
    with pytest.raises(UserError, match=f"of the type {type(prompts).__name__}. Give a list of prompts"):
        decoder.generate_batch(prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": None}, "kind of prompt is not supported"),
        ({"prompt": 5}, "kind of prompt is not supported"),
        ({"prompt": b"Hi"}, "kind of prompt is not supported"),
        ({"prompt": "a\ud800"}, "messages holds text that is not UTF-8"),
        ({"prompt": "\ud800", "raw": True}, "The prompt is not UTF-8"),
        ({"prompt": [{"role": "system", "content": "\ud800"}]}, "messages holds text that is not UTF-8"),
        ({"prompt": "a", "stop": ["x", "\ud800"]}, "A stop string is not UTF-8"),
        ({"prompt": [{"role": "alien", "content": "a"}]}, "of the role 'alien' cannot be answered. Write {'role'"),
        ({"prompt": [{"role": None, "content": "a"}]}, "a message of the role None"),
        ({"prompt": [{"role": "user", "content": 5}]}, "an int where text is expected"),
        ({"prompt": [{"role": "user", "content": None}]}, "a message without text"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "The prompt is empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "A prompt with image_url content cannot be answered. Write {'role'",
        ),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": " \n\t"}, "The prompt is empty"),
        ({"prompt": "", "raw": True}, "The prompt is empty"),
        ({"prompt": [{"role": "system", "content": "brief"}, {"role": "user", "content": " "}]}, "The prompt is empty"),
        ({"prompt": [1, "a"]}, "kind of prompt is not supported"),
        ({"prompt": [{"role": "user", "content": "a"}, 3]}, "kind of prompt is not supported"),
        ({"prompt": [{"role": "user"}]}, "a message without text"),
        ({"prompt": [{"content": "a"}]}, "a message of the role None"),
        ({"prompt": [1, 100_000]}, "Token ids run from 1 to 100000"),
        ({"prompt": [-1]}, "Token ids"),
        ({"prompt": "a", "drafter": "head"}, "Did you mean 'heads'"),
        ({"prompt": "a", "drafter": "heads+ngrm"}, "Unknown drafter"),
        ({"prompt": "a", "tree": "chian"}, "Did you mean 'chain'"),
        ({"prompt": "a", "tree": "dynamic"}, "Tune them: headstart tune"),
        ({"prompt": "a", "topp": 0.5}, "Unknown option 'topp'. Did you mean 'top_p'"),
        ({"prompt": "a", "top_p": 0.0}, "top_p is 0"),
        ({"prompt": "a", "top_p": 1.1}, "top_p is 1.1"),
        ({"prompt": "a", "top_k": -1}, "top_k is -1"),
        ({"prompt": "a", "min_p": 2.0}, "min_p is 2"),
        ({"prompt": "a", "repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"prompt": "a", "verifier": "topk"}, "Did you mean 'top_k'"),
        ({"prompt": "a", "draft": "always"}, "draft is 'always'"),
        ({"prompt": "a", "processors": [lambda ids, scores: scores + torch.rand(1)]}, "keeps a state or draws random"),
        ({"prompt": "a", "min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"prompt": "a", "min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens is 9, and max_new_tokens 4"),
        ({"prompt": "a", "stop_token_ids": [1, 5000]}, "stop_token_ids has 5000, and the target's token ids end at"),
        ({"prompt": "a", "stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
        ({"prompt": "a", "stop": 5}, "stop is 5. Give a text"),
        ({"prompt": "a", "stop": ["x", 5]}, "stop is .*'x', 5"),
        ({"prompt": "a", "top_k": 2.5}, "top_k is 2.5. Give a whole number"),
        ({"prompt": "a", "top_k": True}, "top_k is True"),
        ({"prompt": "a", "seed": "x"}, "seed is 'x'. Give a whole number"),
        ({"prompt": "a", "seed": True}, "seed is True"),
        ({"prompt": "a", "max_new_tokens": "8"}, "max_new_tokens is '8'. Give a whole number"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'. Give a number"),
        ({"prompt": "a", "temperature": float("inf")}, "temperature is inf"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"prompt": "a", "drafter": None}, "drafter is None. Give a name"),
        ({"prompt": "a", "processors": abs}, "processors is .*Give a list"),
        ({"prompt": "a", "stop": ""}, "stop string is empty"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop string is empty"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "a", "temperature": -1.0}, "temperature is -1"),
        ({"prompt": "a " * 2000}, "context of 1024"),
    ],
)
def test_bad_prompts_and_options(decoder: Decoder, arguments: dict[str, Any], message: str) -> None:
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(UserError, match=message) as caught:
            call(**arguments)
        assert caught.value.remedy


def test_one_empty_prompt_refuses_the_batch(decoder: Decoder) -> None:
    with pytest.raises(UserError, match="The prompt is empty"):
        decoder.generate_batch(["Hello", "  "])
    assert decoder.tokens("\n", raw=True), "blanks may be continued as they are"


def test_a_target_that_cannot_chat(tmp_path: Path, tiny_target: Target) -> None:
    silent = Target(tiny_target.model, tiny_tokenizer(chat_template=None), "tiny")
    export(tmp_path / "heads", silent)
    loaded = headstart.load(tmp_path / "heads", target=silent)
    with pytest.raises(UserError, match=r"no chat template.*token ids.*raw=True"):
        loaded.generate("Hi")
    assert (
        loaded.generate("Hi", raw=True, max_new_tokens=4).tokens
        == loaded.generate(silent.tokenizer.encode("Hi"), max_new_tokens=4).tokens
    )
    bare = headstart.load(tmp_path / "heads", target=Target(tiny_target.model, None, "tiny"))
    assert bare.generate([5, 6, 7], max_new_tokens=4).text == ""
    for refused in (lambda: bare.generate("Hi", raw=True), lambda: bare.stream([5])):
        with pytest.raises(UserError, match="needs a tokenizer"):
            refused()


def test_a_tree_without_nodes_decodes_plainly(tmp_path: Path, tiny_target: Target) -> None:
    export_heads(tmp_path / "heads", make_heads(tiny_target), tiny_target, {**TUNING, "paths": ()}, {})
    loaded = headstart.load(tmp_path / "heads", target=tiny_target)
    answer = loaded.generate("Hello", max_new_tokens=8)
    plain = loaded.generate("Hello", max_new_tokens=8, drafter="none")
    assert (answer.tokens, answer.tokens_per_round) == (plain.tokens, 1.0)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_stream_joins_to_the_text(decoder: Decoder) -> None:
    for seed in range(6):  # random bytes: broken characters of every kind
        settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": seed}
        stream = decoder.stream("Hello", **settings)
        assert stream.answer is None
        detokenizer = list(stream)
        expected = decoder.generate("Hello", **settings)
        assert stream.answer is not None
        assert (stream.answer.tokens, stream.answer.finish_reason) == (expected.tokens, expected.finish_reason)
        assert "".join(detokenizer) == expected.text == stream.answer.text
        assert all(detokenizer)


def assert_idle() -> None:
    """The engine's thread ends once no request is left."""
    for thread in threading.enumerate():
        if thread.name == "headstart-engine":
            thread.join(60)
            assert not thread.is_alive()


def test_leaving_a_stream_ends_its_decoding(decoder: Decoder) -> None:
    stream = decoder.stream("Hello", max_new_tokens=900, min_new_tokens=900, temperature=1.0)
    list(itertools.islice(stream, 2))
    stream.close()
    assert stream.answer is None
    assert_idle()
    assert list(stream) == []


def test_streams_leave_no_memory(tiny_target: Target) -> None:
    """Read, closed or abandoned: each thread's scratch buffers go with it."""
    decoder, streams = Decoder(tiny_target), itertools.count()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # of glibc

    def resident_after(count: int) -> int:
        for number in itertools.islice(streams, count):
            stream = decoder.stream([5] * 240, max_new_tokens=4, min_new_tokens=4, drafter="none")
            pieces = list(itertools.islice(stream, 1 if number % 4 else None))
            assert pieces
            if number % 4 == 1:
                stream.close()
            del stream
        gc.collect()
        trim(0)
        return int(psutil.Process().memory_info().rss)

    before = resident_after(20)
    assert resident_after(100) - before < 2 << 20  # 35 KB of buffers for each would be 3.5 MB


def reading(stream: Any, started: threading.Event) -> tuple[threading.Thread, list[str], list[BaseException]]:
    """A thread that reads a stream to its end; its pieces and what it raised."""
    pieces: list[str] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for piece in stream:
                pieces.append(piece)
                started.set()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, pieces, errors


def test_a_stream_is_closed_from_another_thread_at_any_time(decoder: Decoder) -> None:
    for wait in (True, False):  # in the middle of the text, and whenever it may be
        for _ in range(5):
            started = threading.Event()
            stream = decoder.stream("Hello", max_new_tokens=900, temperature=1.0, drafter="none", seed=1)
            thread, _, errors = reading(stream, started)
            if wait:
                assert started.wait(60)
            closing = [threading.Thread(target=stream.close) for _ in range(3)]
            for closer in closing:
                closer.start()
            for closer in [*closing, thread]:
                closer.join(60)
                assert not closer.is_alive()
            stream.close()
            assert not errors and list(stream) == []
            assert stream.answer is None or len(stream.answer.tokens) == 900, (
                "a busy machine may close it after its end"
            )
            assert_idle()
    unread = decoder.stream("Hello")
    unread.close()
    assert list(unread) == []


@pytest.mark.parametrize("kind", ["llama", "chains"])
def test_closing_ends_the_reading_of_a_long_prompt_after_a_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of four pieces waits until the stream is closed; the third is never read."""
    for module in ("model.model", "replay.chains"):
        monkeypatch.setattr(f"headstart.{module}.CHUNK", 64)
    model = tiny_model("llama", max_length=1024, vocab_size=len(tiny_tokenizer())) if kind == "llama" else hybrid()
    decoder = Decoder(Target(model, tiny_tokenizer()))
    forwards, reached, closed = list[int](), threading.Event(), threading.Event()
    place, name = (decoder.target, "_run") if kind == "llama" else (decoder.target.model, "forward")
    honest = getattr(place, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        forwards.append(1)
        if len(forwards) == 2:
            reached.set()
            assert closed.wait(60)
        return honest(*args, **kwargs)

    monkeypatch.setattr(place, name, forward)
    stream = decoder.stream([5] * 250, max_new_tokens=4)
    thread, pieces, errors = reading(stream, threading.Event())
    assert reached.wait(60)
    closer = threading.Thread(target=stream.close)
    closer.start()
    stream._decoding._stopped.wait(60)
    closed.set()
    for other in (closer, thread):
        other.join(60)
        assert not other.is_alive()
    assert (len(forwards), pieces, errors, stream.answer) == (2, [], [], None)


_LEFT_OPEN = """
import sys
import headstart
from headstart.model.loading import load_target

decoder = headstart.load(sys.argv[1], target=load_target(sys.argv[2], dtype="float32", device="cpu"))
kept = [decoder.stream("Hello", max_new_tokens=900, temperature=1.0, seed=seed) for seed in range(3)]
for stream in kept:
    next(stream)
print("done")
"""


def test_exit_with_an_open_stream(tiny_target: Target, tiny_target_folder: Path, forks: Forks, tmp_path: Path) -> None:
    export(tmp_path / "heads", tiny_target)
    done = forks.run("-c", _LEFT_OPEN, tmp_path / "heads", tiny_target_folder)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("These heads were ")]
    assert said == []


def test_an_abandoned_stream_ends(decoder: Decoder) -> None:
    for piece in decoder.stream(PROMPTS[0], max_new_tokens=200, drafter="none"):
        assert piece
        break
    assert_idle()


def test_streams_of_one_decoder_do_not_disturb_each_other(decoder: Decoder) -> None:
    """Two threads and one thread that alternates, with drafters that read different layers of the target."""
    settings: list[dict[str, Any]] = [
        {"drafter": "heads", "draft": "on", "max_new_tokens": 24},
        {"drafter": "early-exit:1", "draft": "on", "max_new_tokens": 24},
    ]
    alone = [decoder.generate(prompt, **options) for prompt, options in zip(PROMPTS, settings, strict=False)]

    def read(number: int, answers: list[Any]) -> None:
        for _ in range(6):
            stream = decoder.stream(PROMPTS[number], **settings[number])
            list(stream)
            answers.append(stream.answer)

    answers: list[list[Any]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2), answers))
    streams = [decoder.stream(PROMPTS[number], **settings[number]) for number in range(2)]
    for _ in itertools.zip_longest(*streams):
        pass
    for number, expected in enumerate(alone):
        for answer in [*answers[number], streams[number].answer]:
            assert answer is not None
            assert (answer.tokens, answer.drafter_error) == (expected.tokens, None)
    assert len(answers[0]) == len(answers[1]) == 6


def test_two_threads_stream_a_hundred_times_as_alone(tiny_target_folder: Path, tmp_path: Path) -> None:
    """In bfloat16, where a state that one thread takes from the other changes the text at once."""
    target = load_target(str(tiny_target_folder), dtype="bfloat16", device="cpu")
    export(tmp_path / "heads", target)
    shared = headstart.load(tmp_path / "heads", target)
    options: dict[str, Any] = {"drafter": "heads", "draft": "on", "max_new_tokens": 6, "deterministic": True}
    alone = [shared.generate(prompt, **options).tokens for prompt in PROMPTS[:2]]
    read: list[list[list[int]]] = [[], []]

    def stream(number: int) -> None:
        for _ in range(50):
            answer = shared.stream(PROMPTS[number], **options)
            list(answer)
            assert answer.answer is not None
            read[number].append(answer.answer.tokens)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(stream, range(2)))
    assert read == [[tokens] * 50 for tokens in alone]


def test_a_failure_while_streaming_reaches_the_reader(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(decoder.target, "forward_tree", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        list(decoder.stream("Hello", max_new_tokens=30, min_new_tokens=30, temperature=1.0))


@pytest.mark.parametrize("text", ["naïve café — 漢字 🙂👩‍👩‍👧 done", "🙂", " leading and trailing ", "line\nbreak\n"])
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_pieces_never_break_a_character(text: str, step: int) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(text)
    end = tokenizer.eos_token_id
    detokenizer = IncrementalDetokenizer(tokenizer, frozenset({end}))
    shown = [detokenizer.push([*tokens, end][i : i + step]) for i in range(0, len(tokens) + 1, step)]
    assert "".join(shown) == text
    assert detokenizer.flush() == ""
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_that_is_never_finished_comes_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("ok 🙂")[:-2]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([token]) for token in tokens) == "ok "
    assert detokenizer.flush() == tokenizer.decode(tokens)[3:]


def test_a_target_alone_takes_drafters_that_need_no_heads(tiny_target: Target) -> None:
    alone = headstart.load(target=tiny_target)
    answer = alone.generate(PROMPTS[0], max_new_tokens=6)
    assert answer.tokens == alone.generate(PROMPTS[0], max_new_tokens=6, drafter="ngram").tokens
    assert answer.drafter_error is None and alone.costs is None
    with pytest.raises(UserError, match="was loaded without heads"):
        _ = alone.heads
    with pytest.raises(UserError, match="was loaded without heads"):
        alone.generate(PROMPTS[0], max_new_tokens=6, drafter="heads")
    with pytest.raises(UserError, match="Neither heads nor a target"):
        headstart.load()


def test_models_of_drafters_are_made_once(tiny_target: Target, spy: Any) -> None:
    made = spy(catalog, "EarlyExitDrafter")
    alone, drafter = headstart.load(target=tiny_target), "early-exit:2"
    kinds: list[dict[str, Any]] = [{}, {"draft": "off"}, {"deterministic": True}, {"tree": "chain"}]
    texts = [alone.generate(PROMPTS[0], max_new_tokens=6, drafter=drafter, **kind).tokens for kind in kinds]
    assert made == [(tiny_target, 2)] and texts == texts[:1] * len(kinds)


def test_load_refuses_arguments_of_other_kinds(tiny_target: Target, tiny_target_folder: Path) -> None:
    assert headstart.load(target=tiny_target_folder, dtype="float32").target.name == str(tiny_target_folder)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target": 5}, "target is of the type int. Give a model that transformers loaded"),
        ({"heads": 5}, "heads is of the type int"),
        ({"target": tiny_target, "dtyp": "float32"}, "Unknown option 'dtyp'. Did you mean 'dtype'"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UserError, match=message):
            headstart.load(**arguments)
