"""Plans: lengths from the prompts themselves, and memory that is really needed."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from headstart.data.conversations.building import build_conversations
from headstart.data.generation.generator import Continuation
from headstart.data.generation.in_process import InProcess
from headstart.data.prompts.loading import LeftOut, Prompts
from headstart.data.prompts.shapes import Prompt
from headstart.errors import UserError
from headstart.heads.base import families, family, make_config
from headstart.model.model import Target
from headstart.model.outline import outline
from headstart.pipeline import dry_run as dry_running
from headstart.pipeline import plan as planning
from headstart.pipeline.dry_run import dry_run
from headstart.pipeline.plan import Plan, make_plan, show_plan
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import STAGES, stages_until
from headstart.pipeline.workload import (
    PROMPT_TOKENS,
    Lengths,
    Speeds,
    Workload,
    answer_tokens,
    assumed_lengths,
    counted_lengths,
    optimizer_bytes,
)
from headstart.recipes.recipe import Recipe, load_recipe, parse_recipe
from headstart.recipes.sections import DataSection
from headstart.train.optimizers import make_optimizers


def chat(*texts: str, system: str | None = None) -> Prompt:
    first = [] if system is None else [{"role": "system", "content": system}]
    return Prompt([*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))])


def asked(*texts: str) -> Prompt:
    return Prompt([{"role": "user", "content": text} for text in texts])


def expected(data: DataSection, target: Target, *prompts: Prompt) -> Lengths:
    with pytest.MonkeyPatch.context() as patched:
        found = Prompts(list(prompts), LeftOut(), {})
        patched.setattr("headstart.pipeline.workload.load_prompts", lambda *_, **__: found)
        return counted_lengths(data, target.tokenizer, target.max_length)


class TestLengths:
    def test_prompts_that_are_not_known_are_assumed(self, tiny_target: Target) -> None:
        lengths = counted_lengths(DataSection(max_new_tokens=100), tiny_target.tokenizer, tiny_target.max_length)
        assert (lengths.tokens, lengths.turns, lengths.prompts) == (PROMPT_TOKENS + answer_tokens(100), 1, 0)
        assert lengths.longest == 200 + 100

    def test_every_turn_counts_and_stands_in_the_cache(self, tiny_target: Target) -> None:
        """ChatML: 7 tokens around a user turn and 3 before an answer, which its own end closes, and a line break."""
        data = DataSection(prompts="x", max_new_tokens=10)
        usual = answer_tokens(10)
        single = expected(data, tiny_target, asked("x" * 20))
        assert (single.tokens, single.turns, single.answer, single.longest) == (28 + usual, 1, usual, 28 + 10)
        double = expected(data, tiny_target, asked("x" * 20, "y" * 30))
        assert double.turns == 2 and double.longest == 28 + 10 + 40 + 10
        assert double.tokens == pytest.approx(28 + usual + 40 + usual)
        mean = expected(data, tiny_target, asked("x" * 20), asked("x" * 20, "y" * 30))
        assert mean.tokens == (single.tokens + double.tokens) / 2
        assert mean.longest == double.longest and mean.prompts == 2

    def test_a_conversation_ends_where_writing_ends_it(self, tiny_target: Target) -> None:
        long = asked("x", "y" * 100, "z")
        short = expected(DataSection(prompts="x", max_new_tokens=10), tiny_target, asked("x"))
        cut = expected(DataSection(prompts="x", max_new_tokens=10, max_prompt_tokens=50), tiny_target, long)
        assert cut == short
        many = asked(*["x" * 50] * 100)
        lengths = expected(DataSection(prompts="x", max_new_tokens=100), tiny_target, many)
        assert 0.9 * tiny_target.max_length <= lengths.longest <= tiny_target.max_length
        assert lengths.tokens <= tiny_target.max_length and 5 <= lengths.turns <= 9

    def test_given_answers_are_counted_as_they_are(self, tiny_target: Target) -> None:
        data = DataSection(prompts="x", max_new_tokens=10, regenerate=False)
        given = chat("Hi", "x" * 200, "So", "y" * 100)
        lengths = expected(data, tiny_target, given)
        whole = tiny_target.tokenizer.apply_chat_template(given.messages, tokenize=False)
        assert lengths.tokens == pytest.approx(len(tiny_target.tokenizer(whole)["input_ids"]), rel=0.03)
        assert lengths.answer == 300 and lengths.turns == lengths.longest == 0

    def test_match_written_texts(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "p.jsonl"
        rows = [{"turns": [f"First {i} " * (1 + i % 3), f"Second {i}", "Third"][: 1 + i % 3]} for i in range(24)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer = [*tiny_target.tokenizer.encode("Fine day"), tiny_target.tokenizer.eos_token_id]
        monkeypatch.setattr(InProcess, "continue_rows", lambda _self, rows, _how: [list(answer) for _ in rows])
        sizes = {"conversations": 22, "heldout": 1, "validation": 1, "max_new_tokens": 10, "batch_size": 24}
        data = DataSection.model_validate({"prompts": str(path), **sizes})
        monkeypatch.setattr("headstart.pipeline.workload.answer_tokens", lambda _: float(len(answer)))
        lengths = counted_lengths(data, tiny_target.tokenizer, tiny_target.max_length)
        splits = build_conversations(tiny_target, data, tmp_path / "data")
        written = [len(item.tokens) for item in splits.train + splits.validation]
        assert lengths.prompts == 24
        assert lengths.tokens == pytest.approx(sum(written) / len(written), rel=0.05)


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
    """Skip timing forwards, and count no memory of this process."""
    monkeypatch.setattr(planning, "dry_run", lambda *_: Speeds(0.01, 1e-4, 1e-3, 0.1, 1000, "a dry run"))
    monkeypatch.setattr(planning, "_resident", lambda: 0)


@pytest.mark.usefixtures("measured_before")
def test_data_of_other_runs_are_named(tmp_path: Path, tiny_target_folder: Path) -> None:
    settings = recipe(tmp_path, tiny_target_folder, data={"prompts": prompt_file(tmp_path, 1)})
    assert not any("reuses" in note for note in make_plan(quiet(settings, tmp_path / "runs" / "one")).notes)
    execute(quiet(settings, tmp_path / "runs" / "one"), stages_until("states"))
    notes = [note for note in make_plan(quiet(settings, tmp_path / "runs" / "two")).notes if "reuses" in note]
    for note, stage in zip(notes, ("conversations", "states"), strict=True):
        assert note.startswith(f"The run reuses {stage} in {tmp_path / 'runs' / 'artifacts' / stage}")
    assert not any("reuses" in note for note in make_plan(quiet(settings, tmp_path / "runs" / "one")).notes)


@pytest.mark.usefixtures("measured_before")
class TestMemory:
    def test_cache_memory(self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def writing(turns: int, threads: int) -> tuple[int, Target]:
            monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
            data = {"prompts": prompt_file(tmp_path, turns), "max_new_tokens": 50}
            run = quiet(recipe(tmp_path, tiny_target_folder, data=data), tmp_path / "run")
            return make_plan(run).memory["conversations"], run.target

        one, target = writing(1, 1)
        five, _ = writing(5, 1)
        four_turns = 4 * (50 + len("Question 39") + 8)
        each = 1.875 * target.kv_bytes_per_token + 2 * (4 * target.hidden_size + 5)  # hidden states are kept as well
        assert five - one == pytest.approx(4 * four_turns * each, rel=0.05)
        assert writing(5, 2)[0] == 2 * five

    def test_writing_memory(
        self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, spy: Any
    ) -> None:
        """The largest cache that is made, and the copy beside it for a moment."""
        settings = recipe(tmp_path, tiny_target_folder, data={"prompts": prompt_file(tmp_path, 3)})
        run = quiet(settings, tmp_path / "run")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        planned = make_plan(run).memory["conversations"]
        calls = spy(Target, "new_cache")
        end = run.target.tokenizer.eos_token_id

        continue_rows = InProcess.continue_rows

        def longest(self: InProcess, rows: list[list[int]], how: Continuation) -> list[list[int]]:
            return [[*row[:-1], end] for row in continue_rows(self, rows, replace(how, ends=frozenset()))]

        monkeypatch.setattr(InProcess, "continue_rows", longest)
        build_conversations(run.target, settings.data, tmp_path / "data")
        made = [rows * capacity * target.kv_bytes_per_token for target, rows, capacity in calls]
        assert 0.6 * planned < 1.875 * max(made) <= planned, "the rest are logits and hidden states"

    def test_training_memory(self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def training(states: str = "stored", **train: Any) -> int:
            run = quiet(recipe(tmp_path, tiny_target_folder, train=train, data={"states": states}), tmp_path / "run")
            return make_plan(run).memory["train"]

        target = quiet(recipe(tmp_path, tiny_target_folder), tmp_path / "run").target
        before_and_after_loading = itertools.cycle((0, 4 * target.parameters))
        monkeypatch.setattr(planning, "_resident", lambda: next(before_and_after_loading))
        # Medusa reads the final state; two steps are read ahead.
        states = 4 * target.hidden_size
        assert training(batch_tokens=1024) - training(batch_tokens=512) >= 512 * 3 * states
        heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, target))
        minimum = 16 * heads.trainable_parameters + 512 * states + 2 * 4 * target.vocab_size * target.hidden_size
        teacher, complete = training(batch_tokens=512, prefetch=0), training("online", batch_tokens=512)
        assert minimum <= teacher < complete < teacher + 4 * target.parameters

    def test_too_little_memory(self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = quiet(recipe(tmp_path, tiny_target_folder), tmp_path / "run")
        plan = make_plan(run)
        assert plan.problems == []
        monkeypatch.setattr(planning, "free_bytes", lambda _device: plan.memory["eval"])
        (problem,) = make_plan(run).problems
        assert problem.startswith("Training takes") and "lower train.batch_tokens" in problem
        monkeypatch.setattr(planning, "free_bytes", lambda _device: 1000)
        assert "The report takes" in " ".join(make_plan(run).problems)

    def test_shared_cpu_memory(self, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = quiet(recipe(tmp_path, tiny_target_folder), tmp_path / "run")
        needed = make_plan(run).memory
        monkeypatch.setattr(planning, "free_bytes", lambda _device: 2 * needed["train"] - 2)
        assert make_plan(run).problems == []
        (problem,) = make_plan(run, 2).problems
        assert problem.startswith("Training takes"), "one process makes the report, and has all memory"
        shares = {}
        for device in ("cpu", "cuda"):
            target = cast(Target, SimpleNamespace(device=torch.device(device)))
            work = Workload(
                run.recipe, target, cast(Any, None), [], cast(Any, None), processes=8, bytes_with_target=16, free=64
            )
            shares[device] = [work.room(stage) for stage in ("train", "eval")]
        assert shares == {"cpu": [10, 80], "cuda": [80, 80]}

    def test_the_states_budget_limits_writing(self, tmp_path: Path, tiny_target_folder: Path) -> None:
        def plan(gigabytes: float) -> Plan:
            data = {"prompts": "self", "conversations": 100_000, "cache_gigabytes": gigabytes}
            return make_plan(quiet(recipe(tmp_path, tiny_target_folder, data=data), tmp_path / "run"))

        told = re.search(r"^1.0 GB, .* all would take (\d+).* GB", dict(plan(1.0).facts)["Hidden states on disk"])
        assert told is not None
        assert "would take" not in dict(plan(float(told[1]) + 1).facts)["Hidden states on disk"]
        half, whole = plan(0.01), plan(0.02)
        assert whole.disk["conversations"] == pytest.approx(2 * half.disk["conversations"], rel=0.01)
        counts = [int(dict(one.facts)["Conversations"].split()[1]) for one in (half, whole)]
        assert counts[1] == pytest.approx(2 * counts[0], rel=0.1) and counts[1] < 50_000

    def test_missing_and_few_prompts(self, tmp_path: Path, tiny_target_folder: Path) -> None:
        empty = tmp_path / "empty.jsonl"
        empty.write_text("")
        few = {"data": {"prompts": str(empty)}, "train": {"steps": None, "epochs": 10}}
        plan = make_plan(quiet(recipe(tmp_path, tiny_target_folder, **few), tmp_path / "run"))
        assert any("raise minutes" in note for note in plan.notes)
        assert any("No usable prompt" in problem for problem in plan.problems)
        assert "assumed" in dict(plan.facts)["A conversation"]
        data = {"prompts": prompt_file(tmp_path, 2), "conversations": 10_000}
        run = Run(recipe(tmp_path, tiny_target_folder, data=data), tmp_path / "run", Console(file=io.StringIO()))
        known = make_plan(run)
        assert not any("raise minutes" in note for note in known.notes), "the recipe names its steps"
        facts = dict(known.facts)
        assert facts["Conversations"].startswith("about 32 (at most 10000")
        mixed = recipe(tmp_path, tiny_target_folder, data={**data, "prompts": [data["prompts"], "self"]})
        expected = dict(make_plan(quiet(mixed, tmp_path / "mixed")).facts)["Conversations"]
        assert expected.startswith("about 10000 "), "the target writes the rest"
        assert "2.0 answers (from 40 of the prompts)" in facts["A conversation"]
        show_plan(run, known)


def tried(target: Target, batch_tokens: int, limit: float = 1.0) -> Speeds:
    settings = {"family": "medusa", "num_heads": 2}
    heads = family("medusa")(make_config(settings, target))
    heads.warm_start(target)
    sizes = {"data": {"conversations": 4, "batch_size": 4}, "train": {"batch_tokens": batch_tokens}}
    recipe = parse_recipe({"name": "x", "heads": settings, **sizes})
    return dry_run(target, heads, [-1], recipe, assumed_lengths(recipe.data, target.max_length), limit)


def test_activation_memory_grows_with_the_batch(tiny_target: Target) -> None:
    lengths = assumed_lengths(DataSection(), tiny_target.max_length)
    small, large = (tried(tiny_target, tokens).batch_bytes for tokens in (1024, 4096))
    assert small > 0
    # A hidden state of each of two heads for each token of an answer, at the least.
    answers = 3072 * lengths.answer / lengths.tokens
    assert large >= 0.95 * answers * 2 * tiny_target.hidden_size * 4


@pytest.mark.parametrize(("slow", "steps", "rows"), [(0.04, 32, 4), (100.0, 2, 4)])
def test_a_dry_run_is_limited(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, slow: float, steps: int, rows: int
) -> None:
    """On a fake clock a step and a learned token take `slow` seconds each; nothing is repeated beyond the limit."""
    now, work = [0.0], dry_running._DryRun

    def slowed(name: str, each: float) -> Callable[[Any, int], int]:
        run = getattr(work, name)

        def method(self: Any, size: int) -> int:
            done: int = run(self, size)
            now[0] += each * done
            return done

        return method

    for name, each in (("decode", slow), ("write", slow / 8), ("prefill", slow), ("train", slow), ("update", 0.0)):
        monkeypatch.setattr(work, name, slowed(name, each))
    monkeypatch.setattr(dry_running, "perf_counter", lambda: now[0])
    speeds = tried(tiny_target, 512, 30.0)
    assert (speeds.step, speeds.token, speeds.written) == pytest.approx((slow, slow, slow / 8))
    assert speeds.batch == pytest.approx(512 * slow), "updates take no time here"
    assert f"{steps} decoding steps in" in speeds.measured
    assert re.search(rf"\b({8 * rows}|{16 * rows}) tokens written in", speeds.measured), "by one worker or two"
    least = slow * (2 + 2 + 16 + 2 + 2 * 4 + 64 + 4 * 16)  # a warm-up and one of each, training twice
    assert now[0] <= max(30, least)


PAPER = Path(__file__).parents[1] / "docs" / "plans"
"""Configs of models that are not on this machine."""


def on_paper(model: str, recipe_name: str, folder: Path, processes: int = 1, states: str = "stored") -> Plan:
    here = [f"data.{name}=null" for name in ("server", "states_server")]
    found = load_recipe(recipe_name, [f"target={PAPER / model}", f"data.states={states}", *here])
    return make_plan(quiet(found, folder / "none"), processes, prompt_tokens=200)


class TestByTheConfigAlone:
    def test_a_config_says_how_large_a_model_is(self) -> None:
        """Parameters as their makers count them; keys and values of 8 heads of 128 numbers, two bytes each."""
        llama, moe = outline(str(PAPER / "llama-3.1-8b")), outline(str(PAPER / "qwen3-coder-480b"))
        assert llama.parameters == 8_030_261_248 and llama.dtype == torch.bfloat16
        assert llama.kv_bytes_per_token == 32 * 8 * 128 * 2 * 2
        assert moe.parameters == pytest.approx(480e9, rel=0.001)

    def test_an_outline_is_the_target_it_stands_for(self, tiny_target: Target, tiny_target_folder: Path) -> None:
        drawn = outline(str(tiny_target_folder), "float32")
        for name in ("parameters", "hidden_size", "vocab_size", "max_length", "kv_shapes", "kv_bytes_per_token"):
            assert getattr(drawn, name) == getattr(tiny_target, name), name
        assert all(weight.is_meta for weight in drawn.model.parameters())
        for name, cls in families().items():
            settings = {"family": name, "draft_vocab_size": 64}
            if "aux_layers" in cls.Config.model_fields:
                settings["aux_layers"] = [1, 2] if "mask_token_id" in cls.Config.model_fields else [1, 2, 3]
            real, paper = (cls(make_config(settings, one)) for one in (tiny_target, cast(Target, drawn)))
            assert real.config == paper.config
            real.warm_start(tiny_target)
            real.bind(tiny_target)
            with torch.device("meta"):
                paper = cls(make_config(settings, cast(Target, drawn)))
            paper.bind(cast(Target, drawn))
            # Attention is not counted on a CPU.
            assert paper.flops_per_draft() == pytest.approx(real.flops_per_draft(), rel=0.05), name

    def test_eight_processes_share_the_steps_and_send_gradients(self, tmp_path: Path) -> None:
        one, eight = (on_paper("llama-3.1-8b", "eagle3-8b", tmp_path, processes) for processes in (1, 8))
        assert one.network == 0
        heads = next(float(much.split()[4]) for what, much in eight.facts if what == "Heads")
        assert eight.network == pytest.approx(2 * 7 / 8 * 4 * heads * 1e6, rel=0.001)
        assert one.steps is not None and eight.steps is not None
        assert one.steps == pytest.approx(8 * eight.steps, rel=0.02)
        assert one.disk == eight.disk and one.problems == eight.problems == []
        per_token = 4 * 4096 * 2 + 5
        assert one.disk["states"] == pytest.approx(min(550e9, 32128 * (200 + answer_tokens(512)) * per_token), rel=0.01)

    @pytest.mark.parametrize("recipe_name", ["eagle3-8b", "medusa-8b", "dspark-8b"])
    def test_recipes_for_8b_use_all_conversations_and_store_no_states(self, tmp_path: Path, recipe_name: str) -> None:
        """Long ones, of several turns, would not all fit the disk."""
        recipe = load_recipe(recipe_name, [f"target={PAPER / 'llama-3.1-8b'}"])
        run = quiet(recipe, tmp_path / "none")
        plans = [make_plan(run, 8, prompt_tokens=tokens) for tokens in (300, 2000)]
        for plan in plans:
            assert plan.disk["states"] == 0 and plan.problems == []
            facts = dict(plan.facts)
            assert facts["Hidden states"].startswith("not stored: training computes")
        steps = [plan.steps or 0 for plan in plans]
        tokens = [int(dict(plan.facts)["Conversations"].split(", ")[1].split()[0]) for plan in plans]
        assert steps[1] / steps[0] == pytest.approx(tokens[1] / tokens[0], rel=0.02), "no budget cuts them"
        target = run.recipe.data
        assert target.conversations == 32000
        assert target.sampled_fraction == load_recipe("quickstart").data.sampled_fraction

    def test_states_of_70b_are_stored(self, tmp_path: Path) -> None:
        for name in ("eagle3-70b", "dspark-70b"):
            assert load_recipe(name).data.states == "stored"

    def test_a_plan_on_paper_predicts_no_time(self, tmp_path: Path) -> None:
        plan = on_paper("llama-3.1-8b", "eagle3-8b", tmp_path)
        assert plan.seconds == {} and plan.room is None and plan.free_bytes is None
        assert "are not on this machine" in plan.notes[0]
        assert dict(plan.facts)["Memory while training"].startswith("at least 11.7 GB")

    def test_hours_of_writing_follow_from_the_speed_of_the_servers(self, tmp_path: Path) -> None:
        recipe = load_recipe("eagle3-8b", [f"target={PAPER / 'llama-3.1-8b'}", "data.server=http://a:1"])
        plan = make_plan(quiet(recipe, tmp_path / "none"), prompt_tokens=200, tokens_per_second=5000)
        data = recipe.data
        answers = (data.conversations + data.validation + data.heldout) * answer_tokens(data.max_new_tokens)
        assert plan.seconds == {"conversations": pytest.approx(answers / 5000, rel=0.01)}
        assert list(plan.memory) == ["train", "eval"], "nothing is written here"
        ranks = make_plan(quiet(recipe, tmp_path / "none"), 8, prompt_tokens=200, tokens_per_second=5000)
        assert ranks.seconds == plan.seconds, "the speed is that of all servers together"

    def test_a_missing_target_is_refused_with_a_remedy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offline = UserError("The Hub cannot be reached.", "Check the network.")
        monkeypatch.setattr("headstart.model.loading.absent", lambda *_: offline)
        with pytest.raises(UserError, match="cannot be reached") as refused:
            make_plan(quiet(load_recipe("eagle3-8b"), tmp_path / "none"))
        assert "config.json alone is enough" in refused.value.remedy


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimisers_keep_what_is_planned(tiny_target: Target, optimizer: str) -> None:
    settings = {"family": "eagle", "draft_vocab_size": 64}
    heads = family("eagle")(make_config(settings, tiny_target))
    found = parse_recipe({"name": "x", "heads": settings, "train": {"optimizer": optimizer}})
    made = make_optimizers(heads, found.train)
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for one in made:
        one.step()
    kept = sum(
        tensor.nbytes
        for one in made
        for state in one.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.ndim
    )
    assert optimizer_bytes(heads, found.train) == kept


def test_a_plan_for_programs(tmp_path: Path) -> None:
    values = json.loads(json.dumps(on_paper("llama-3.3-70b", "eagle3-70b", tmp_path, processes=2).to_json()))
    stages = [stage.name for stage in STAGES]
    assert list(values["disk"]) == stages[1:] and list(values["memory"]) == ["conversations", "train", "eval"]
    assert values["facts"]["Parameters"] == "70.6 B, 141.1 GB" and list(values["left"]) == stages
