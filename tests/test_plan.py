"""Plans: lengths from the prompts themselves, and memory that is really needed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.data.generate import build_conversations
from headstart.data.prompts import Prompt
from headstart.data.sampling import sample_rows
from headstart.heads import family, make_config
from headstart.pipeline import plan as planning
from headstart.pipeline.lengths import ANSWER_SHARE, PROMPT_TOKENS, expected_lengths, expected_tokens, prompts_of
from headstart.pipeline.plan import make_plan, show_plan
from headstart.pipeline.run import Run
from headstart.pipeline.speeds import Speeds, measure
from headstart.recipe import DataSection, Recipe, parse_recipe
from headstart.target import Target, TreeCache


def chat(*texts: str, system: str | None = None) -> Prompt:
    first = [] if system is None else [{"role": "system", "content": system}]
    return Prompt([*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))])


def asked(*texts: str) -> Prompt:
    return Prompt([{"role": "user", "content": text} for text in texts])


class TestLengths:
    def test_prompts_that_are_not_known_are_assumed(self, tiny_target: Target) -> None:
        lengths = expected_lengths(DataSection(max_new_tokens=100), tiny_target)
        assert (lengths.tokens, lengths.turns, lengths.sample) == (PROMPT_TOKENS + ANSWER_SHARE * 100, 1, 0)
        assert lengths.cached == 200 + 100
        assert prompts_of(DataSection(), tiny_target.tokenizer) == []

    def test_every_turn_counts_and_stands_in_the_cache(self, tiny_target: Target) -> None:
        """ChatML: 7 tokens around a user turn and 3 before an answer, which its own end closes, and a line break."""
        data = DataSection(prompts="x", max_new_tokens=10)
        one = expected_lengths(data, tiny_target, [asked("x" * 20)])
        assert (one.tokens, one.turns, one.read) == (20 + 8 + 8.0, 1, 28)
        assert one.cached == 28 + 10
        two = expected_lengths(data, tiny_target, [asked("x" * 20, "y" * 30)])
        # The second turn adds its 30, the 8 around it, and the end and line break after the first answer.
        assert two.turns == 2
        assert two.read == 28 + (28 + 8 + 40)
        assert two.tokens == 28 + 8 + 40 + 8
        assert two.cached == 28 + 10 + 40 + 10
        mean = expected_lengths(data, tiny_target, [asked("x" * 20), asked("x" * 20, "y" * 30)])
        assert mean.tokens == (one.tokens + two.tokens) / 2 and mean.cached == two.cached and mean.sample == 2
        assert expected_tokens(data, tiny_target, [asked("x" * 20)]) == one.tokens

    def test_a_conversation_ends_where_writing_ends_it(self, tiny_target: Target) -> None:
        long = asked("x", "y" * 100, "z")
        short = expected_lengths(DataSection(prompts="x", max_new_tokens=10), tiny_target, [asked("x")])
        cut = expected_lengths(DataSection(prompts="x", max_new_tokens=10, max_prompt_tokens=50), tiny_target, [long])
        assert cut == short
        many = asked(*["x" * 50] * 100)
        lengths = expected_lengths(DataSection(prompts="x", max_new_tokens=100), tiny_target, [many])
        assert lengths.cached == tiny_target.max_length
        assert lengths.tokens <= tiny_target.max_length and 5 <= lengths.turns <= 9

    def test_given_answers_are_counted_as_they_are(self, tiny_target: Target) -> None:
        data = DataSection(prompts="x", max_new_tokens=10, regenerate=False)
        lengths = expected_lengths(data, tiny_target, [chat("Hi", "x" * 200, "So", "y" * 100)])
        whole = tiny_target.tokenizer.apply_chat_template(
            chat("Hi", "x" * 200, "So", "y" * 100).messages, tokenize=False
        )
        assert abs(lengths.tokens - len(tiny_target.tokenizer(whole)["input_ids"])) <= 4
        assert lengths.turns == lengths.cached == 0

    def test_they_are_those_of_the_conversations_that_are_written(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "p.jsonl"
        rows = [{"turns": [f"First {i} " * (1 + i % 3), f"Second {i}", "Third"][: 1 + i % 3]} for i in range(24)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer = [*tiny_target.tokenizer.encode("Fine day"), tiny_target.tokenizer.eos_token_id]
        monkeypatch.setattr(
            "headstart.data.generator.sample_rows", lambda _target, rows, **_options: [list(answer) for _ in rows]
        )
        sizes = {"conversations": 22, "heldout": 1, "validation": 1, "max_new_tokens": 10, "batch_size": 24}
        data = DataSection.model_validate({"prompts": str(path), **sizes})
        monkeypatch.setattr("headstart.pipeline.lengths.ANSWER_SHARE", len(answer) / 10)
        expected = expected_lengths(data, tiny_target, prompts_of(data, tiny_target.tokenizer))
        splits = build_conversations(tiny_target, data, tmp_path / "data")
        written = [len(item.tokens) for item in splits.train + splits.validation]
        assert expected.sample == 24
        assert expected.tokens == pytest.approx(sum(written) / len(written), rel=0.05)


def recipe(folder: Path, target: Path, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "name": "tiny",
        "target": {"spec": str(target), "dtype": "float32", "device": "cpu"},
        "data": {"conversations": 12, "heldout": 4, "validation": 4, "max_new_tokens": 16, "batch_size": 4},
        "heads": {"family": "medusa", "num_heads": 2},
        "train": {"steps": 4, "batch_tokens": 512},
        "tune": {"widths": [1, 2], "max_nodes": 4},
    }
    for key, values in changes.items():
        settings[key] = {**settings[key], **values}
    return parse_recipe(settings)


def quiet(recipe: Recipe, folder: Path) -> Run:
    return Run(recipe, folder, Console(quiet=True))


def prompt_file(folder: Path, turns: int, count: int = 40) -> str:
    path = folder / f"prompts-{turns}.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Question {i}"] * turns}) + "\n" for i in range(count)))
    return str(path)


@pytest.fixture
def measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward is timed."""
    monkeypatch.setattr(planning, "measure", lambda *_: Speeds(0.01, 1e-4, 0.01, 0.1, 1000))


@pytest.mark.usefixtures("measured_before")
class TestMemory:
    def test_turns_fill_the_cache_and_so_do_two_workers(
        self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def writing(turns: int, threads: int) -> tuple[int, Target]:
            monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
            data = {"prompts": prompt_file(tmp_path, turns), "max_new_tokens": 50}
            run = quiet(recipe(tmp_path, tiny_target_folder, data=data), tmp_path / "run")
            return make_plan(run).memory["writing"] - run.target.parameters * 4, run.target

        one, target = writing(1, 1)
        five, _ = writing(5, 1)
        assert five > 4.5 * one
        assert writing(5, 2)[0] == 2 * five
        rows, longest = 4, 5 * (50 + len("Question 39") + 8)
        assert rows * longest * target.kv_bytes_per_token < five < 2.2 * rows * longest * target.kv_bytes_per_token

    def test_what_is_said_of_writing_is_what_it_takes(
        self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The largest cache that is made, and the copy beside it for a moment."""
        made: list[int] = []
        new_cache = Target.new_cache

        def noted(self: Target, rows: int, capacity: int) -> TreeCache:
            made.append(rows * capacity * self.kv_bytes_per_token)
            return new_cache(self, rows, capacity)

        settings = recipe(tmp_path, tiny_target_folder, data={"prompts": prompt_file(tmp_path, 3)})
        run = quiet(settings, tmp_path / "run")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        planned = make_plan(run).memory["writing"] - run.target.parameters * 4
        monkeypatch.setattr(Target, "new_cache", noted)
        end = run.target.tokenizer.eos_token_id

        def longest(*arguments: Any, **options: Any) -> list[list[int]]:
            rows = sample_rows(*arguments, **{**options, "ends": frozenset()})
            return [[*row[:-1], end] for row in rows]

        monkeypatch.setattr("headstart.data.generator.sample_rows", longest)
        build_conversations(run.target, settings.data, tmp_path / "data")
        assert 0.9 * planned < 1.875 * max(made) <= planned

    def test_training_counts_states_teacher_and_optimiser(self, tmp_path: Path, tiny_target_folder: Path) -> None:
        def training(**train: int) -> int:
            run = quiet(recipe(tmp_path, tiny_target_folder, train=train), tmp_path / "run")
            return make_plan(run).memory["training"]

        target = quiet(recipe(tmp_path, tiny_target_folder), tmp_path / "run").target
        each = (1 * target.hidden_size + target.vocab_size) * 4  # Medusa aux layers the final state only
        assert training(batch_tokens=1024) - training(batch_tokens=512) == 512 * each
        heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, target))
        minimum = 4 * target.parameters + 16 * heads.trainable_parameters + 512 * each
        assert training(batch_tokens=512) >= minimum

    def test_too_little_memory_is_a_problem_unless_halves_help(
        self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = recipe(tmp_path, tiny_target_folder, data={"prompts": prompt_file(tmp_path, 3), "batch_size": 512})
        plan = make_plan(quiet(settings, tmp_path / "run"))
        own = quiet(settings, tmp_path / "run").target.parameters * 4
        assert plan.problems == []
        between = (max(plan.memory["training"], plan.memory["report"]) + plan.memory["writing"]) // 2 - own
        monkeypatch.setattr(planning, "free_bytes", lambda _device: between)
        plan = make_plan(quiet(settings, tmp_path / "run"))
        assert plan.problems == []
        assert "written in halves" in dict(plan.facts)["KV cache while writing data"]
        monkeypatch.setattr(planning, "free_bytes", lambda _device: 1000)
        said = " ".join(make_plan(quiet(settings, tmp_path / "run")).problems)
        for what in ("Training takes", "The report takes", "Writing the longest conversation takes"):
            assert what in said

    def test_prompts_that_cannot_be_read_are_a_problem_and_fewer_than_asked_for_are_counted(
        self, tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        empty = tmp_path / "empty.jsonl"
        empty.write_text("")
        plan = make_plan(quiet(recipe(tmp_path, tiny_target_folder, data={"prompts": str(empty)}), tmp_path / "run"))
        assert any("No usable prompt" in problem for problem in plan.problems)
        assert "assumed" in dict(plan.facts)["A conversation"]
        data = {"prompts": prompt_file(tmp_path, 2), "conversations": 10_000}
        run = Run(recipe(tmp_path, tiny_target_folder, data=data), tmp_path / "run", Console(file=io.StringIO()))
        facts = dict(make_plan(run).facts)
        assert facts["Conversations"].startswith("about 32 (of 10000")
        assert "2.0 answers (from 40 of the prompts)" in facts["A conversation"]
        show_plan(run, make_plan(run))


def test_what_training_keeps_for_its_backward_grows_with_the_batch(tiny_target: Target) -> None:
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, tiny_target))
    heads.warm_start(tiny_target)
    small, large = (measure(tiny_target, heads, [-1], 2, tokens).kept_bytes for tokens in (1024, 4096))
    assert small > 0
    # A hidden state of each of two heads for each token, at the least.
    assert large - small >= 3072 * 2 * tiny_target.hidden_size * 4
