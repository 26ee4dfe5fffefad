"""Prompts drawn from several sources by weight, and the commits the sources are pinned to."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.data.conversations import batch_generator
from headstart.data.conversations.building import build_conversations
from headstart.data.conversations.identity import identity, pin_as_begun, pin_to
from headstart.data.prompts.loading import Prompts, interleave, load_prompts
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.sources import Origin
from headstart.errors import UserError
from headstart.heads.settings import Role
from headstart.model.model import Target
from headstart.pipeline.data_stages import conversations
from headstart.pipeline.run import Run, execute, left_to_do
from headstart.pipeline.stages import check_inputs, stages_until
from headstart.recipes.recipe import Recipe, load_recipe, parse_recipe
from headstart.recipes.sections import DataSection, PromptSource
from tests.data.loading import everything, write_rows
from tests.spies import spy


def write(path: Path, *texts: str) -> str:
    return write_rows(path, *({"prompt": text} for text in texts))


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """59 prompts "a ..", and ten "b .." at a third of the weight; "b 3" is in both files."""
    first = write(tmp_path / "p.jsonl", *(f"a {i}" for i in range(59)), "b 3")
    (tmp_path / "other").mkdir()
    second = write(tmp_path / "other" / "p.jsonl", *(f"b {i}" for i in range(10)))
    return [{"source": first, "weight": 3}, {"source": second}]


def recipe_of(target: Path, data: dict[str, Any]) -> Recipe:
    spec = {"spec": str(target), "dtype": "float32", "device": "cpu"}
    return parse_recipe({"name": "mixed", "target": spec, "data": data, "heads": {"family": "medusa"}})


def drawn(sources: list[dict[str, Any]], limit: int | None, seed: int = 0) -> Prompts:
    data = DataSection.model_validate({"prompts": sources})
    return load_prompts(data, limit=limit, seed=seed)


def texts(found: Prompts) -> list[str]:
    return [prompt.turns[0] for prompt in found.prompts]


def test_sources_keep_their_weights_at_every_point(sources: list[dict[str, Any]]) -> None:
    some = drawn(sources, 36)
    kinds = [text[0] for text in texts(some)]
    assert all(abs(kinds[:count].count("b") - count / 4) <= 1 for count in range(1, 37))
    assert len({prompt.id for prompt in some.prompts}) == 36, "both files are called p.jsonl"
    assert not some.used_up
    of_kinds = {prompt.category: prompt.turns[0][0] for prompt in some.prompts}
    assert of_kinds == {sources[0]["source"]: "a", sources[1]["source"]: "b"}, "the source is the default category"


def test_larger_limit_continues_the_seeds_order(sources: list[dict[str, Any]]) -> None:
    everything = texts(drawn(sources, None))
    for limit in (1, 7, 36, 60):
        assert texts(drawn(sources, limit)) == everything[:limit]
    assert everything != texts(drawn(sources, None, seed=1))


def test_exhausted_source_is_named_and_no_prompt_repeats(sources: list[dict[str, Any]]) -> None:
    found = drawn(sources, 60)
    assert Counter(text[0] for text in texts(found)) == {"a": 50, "b": 10}
    ends = {letter: 1 + max(i for i, text in enumerate(texts(found)) if text[0] == letter) for letter in "ab"}
    assert found.used_up == {sources[1]["source"]: ends["b"]}
    everything = drawn(sources, None)
    assert len(texts(everything)) == len(set(texts(everything))) == 69
    assert everything.used_up == {sources[0]["source"]: 69, sources[1]["source"]: ends["b"]}
    assert everything.left_out.counts == {"repeated": 1}


def test_three_sources_keep_their_weights() -> None:
    counts = Counter[int]()
    turns = interleave([iter(range(1000)) for _ in range(3)], [0.5, 0.3, 0.2])
    for number, (source, _) in zip(range(1, 501), turns, strict=False):
        counts[source] += 1
        assert all(abs(counts[one] - number * weight) < 2 for one, weight in enumerate([0.5, 0.3, 0.2]))


def test_source_without_prompts_is_refused(sources: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(UserError, match=r"No usable prompt in .*empty\.jsonl: 1 read"):
        drawn([*sources, {"source": str(tmp_path / "empty.jsonl"), "weight": 1e-3}], None)


def test_splits_keep_the_weights(tiny_target: Target, sources: list[dict[str, Any]], tmp_path: Path) -> None:
    sizes = {"conversations": 12, "heldout": 4, "validation": 4, "max_new_tokens": 8, "batch_size": 4}
    data = DataSection.model_validate({"prompts": sources, **sizes})
    splits = build_conversations(tiny_target, data, tmp_path / "data")
    parts = (splits.heldout, splits.validation, splits.train)
    assert [sum(item.messages[0]["content"].startswith("b") for item in part) for part in parts] == [1, 1, 3]


def own_prompts(_target: Target, count: int, _breadth: str, seed: int, **_rest: Any) -> list[tuple[str, str]]:
    return [(f"own {seed} {i}", "own") for i in range(count)]


def test_target_writes_its_fraction(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every split, and everything missing once the files are exhausted, but no more than that."""
    monkeypatch.setattr(batch_generator, "generate_prompts", own_prompts)
    counts = spy(monkeypatch, batch_generator, "generate_prompts", lambda _target, count, *_: count)
    sizes = {"conversations": 20, "heldout": 4, "validation": 8, "max_new_tokens": 8, "batch_size": 8}
    few = {"source": write(tmp_path / "few.jsonl", *(f"a {i}" for i in range(16))), "weight": 3}
    data = DataSection.model_validate({"prompts": [few, "self"], **sizes})
    said = io.StringIO()
    splits = build_conversations(tiny_target, data, tmp_path / "data", Console(file=said, width=200))
    assert f"No more prompts in {few['source']}: the other sources replace them." in said.getvalue()
    parts = (splits.heldout, splits.validation, splits.train)
    assert [sum(item.category == "own" for item in part) for part in parts] == [1, 2, 14]
    assert [len(part) for part in parts] == [4, 8, 20]
    assert counts == [2, 3, 3, 8, 8], "with files left a few more than wanted, then complete batches"
    written = identity(tiny_target, data)
    assert written != identity(tiny_target, data.model_copy(update={"seed_prompts": "none"}))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_fractions_of_a_prompt_add_up_across_a_restart(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    monkeypatch.setattr(batch_generator, "generate_prompts", own_prompts)
    sizes = {"conversations": 40, "heldout": 4, "validation": 4, "max_new_tokens": 8, "batch_size": batch_size}
    given = {"source": write(tmp_path / "p.jsonl", *(f"a {i}" for i in range(60))), "weight": 9}
    data = DataSection.model_validate({"prompts": [given, "self"], **sizes})
    splits = build_conversations(tiny_target, data, tmp_path / "data")
    assert 3 <= sum(item.category == "own" for item in splits.train) <= 5
    for file in sorted((tmp_path / "data" / "batches").glob("*.jsonl"))[7:]:
        file.unlink()
    assert everything(build_conversations(tiny_target, data, tmp_path / "data")) == everything(splits)


def test_edited_exclusion_rebuilds(tiny_target_folder: Path, sources: list[dict[str, Any]], tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["a 1"]}\n')
    sizes = {"conversations": 60, "heldout": 2, "validation": 2, "max_new_tokens": 8, "batch_size": 32}
    recipe = recipe_of(tiny_target_folder, {"prompts": sources, "exclude": [str(questions)], **sizes})
    stages = stages_until("conversations")
    asked = []
    for _ in range(2):
        check_inputs(recipe, stages)
        run = Run(recipe, tmp_path / "run", Console(quiet=True))
        execute(run, stages)
        assert not left_to_do(run, stages)
        asked.append({item.messages[0]["content"] for item in conversations(run, "train")})
        questions.write_text('{"turns": ["a 2"]}\n')
    assert "a 1" not in asked[0] and "a 2" not in asked[1]
    assert "a 2" in asked[0] or "a 1" in asked[1], "either may be held out"
    questions.unlink()
    with pytest.raises(UserError, match=r"No file at .*questions\.jsonl"):
        check_inputs(recipe, stages)
    with pytest.raises(UserError, match=r"No file at none\.jsonl.*data\.prompts"):
        check_inputs(load_recipe("quickstart", ["data.prompts=[none.jsonl]"]), stages)


def test_identity_follows_weights_and_contents(tiny_target: Target, sources: list[dict[str, Any]]) -> None:
    def of(*given: dict[str, Any]) -> dict[str, Any]:
        settings = DataSection.model_validate({"prompts": list(given)})
        return identity(tiny_target, settings)

    one, other = sources
    same = of(one, other)
    assert same == of({**one, "weight": 6}, {**other, "weight": 2})
    assert json.loads(json.dumps(same)) == same
    assert same != of({**one, "weight": 4}, other)
    assert same != of(one, {**other, "split": "test"})
    assert same != of(one)
    write(Path(other["source"]), "b 1")
    assert same != of(one, other)


CHANGES: dict[str, Any] = {
    "split": "test",
    "revision": "abc",
    "seed_prompts": "none",
    "max_prompt_tokens": 99,
    "prefix_tokens": 9,
    "chat_template_kwargs": {"a": 1},
    "max_new_tokens": 9,
    "temperature": 0.5,
    "sampled_fraction": 0.5,
    "writing_dtype": "int8",
    "regenerate": False,
    "seed": 3,
    "conversations": 7,
    "heldout": 1,
    "validation": 2,
    "minutes": 1.5,
    "batch_size": 3,
    "states": "online",
    "cache_gigabytes": 9.0,
    "states_dtype": "fp8",
    "states_server": ("vllm",),
    "server_command": "vllm serve",
    "server_arguments": "--max-model-len 9",
    "server_requests": 3,
}
"""Another value of every setting of the data but its sources."""


def test_the_identity_follows_every_setting_of_the_content_and_no_other(
    tiny_target: Target, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources are a file, which has no revision, and the target itself."""
    data = DataSection.model_validate({"prompts": [sources[0], "self"]})
    monkeypatch.setattr("headstart.data.conversations.identity.has_template", lambda _: False)
    assert CHANGES.keys() == DataSection.model_fields.keys() - {"prompts", "exclude", "server"}
    known = identity(tiny_target, data)
    changed = {name: identity(tiny_target, data.model_copy(update={name: value})) for name, value in CHANGES.items()}
    followed = {name for name, other in changed.items() if other != known}
    assert followed == DataSection.names(Role.CONTENT) - {"prompts", "exclude", "revision"}


def test_settings_without_effect_are_not_part_of_the_identity(
    tiny_target: Target, sources: list[dict[str, Any]]
) -> None:
    def followed(prompts: str) -> set[str]:
        data = DataSection(prompts=prompts)
        known, names = identity(tiny_target, data), ("split", "regenerate", "seed_prompts", "prefix_tokens")
        assert known == identity(tiny_target, DataSection(prompts=(PromptSource(source=prompts),)))
        changed = {name: identity(tiny_target, data.model_copy(update={name: CHANGES[name]})) for name in names}
        return {name for name in names if changed[name] != known}

    assert followed("self") == {"seed_prompts"}
    assert followed(sources[0]["source"]) == {"split", "regenerate"}


def test_int8_changes_the_identity_unless_a_server_writes(tiny_target: Target) -> None:
    def known(**settings: Any) -> dict[str, Any]:
        return identity(tiny_target, DataSection.model_validate(settings))

    assert known(writing_dtype="int8") != known() == known(writing_dtype="auto")
    server = "http://localhost:8000"
    assert known(writing_dtype="int8", server=server) == known(server=server)


def test_run_keeps_the_commits_it_began_with(monkeypatch: pytest.MonkeyPatch, tiny_target: Target) -> None:
    newest = "1" * 40
    monkeypatch.setattr(
        "headstart.data.conversations.identity.find_origin",
        lambda source, revision: Origin(source, commit=revision or newest),
    )
    data = DataSection(prompts=(PromptSource(source="x/a"), PromptSource(source="x/b", revision="2" * 40)))
    settings = data
    begun = identity(tiny_target, settings)
    fixed = pin_to(data, begun)
    assert [one.revision for one in fixed.sources] == ["1" * 40, "2" * 40]
    newest = "3" * 40
    assert identity(tiny_target, settings) != begun
    assert identity(tiny_target, pin_as_begun(settings, begun)) == begun
    other = DataSection(prompts=(PromptSource(source="x/c"), PromptSource(source="x/b")))
    assert [one.revision for one in pin_as_begun(other, begun).sources] == [None, "2" * 40]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.prompts=[]", r"'data.prompts' is \[\].*list of {source, weight}"),
        ("data.prompts=3", "'data.prompts' is 3"),
        ("data.prompts=[{path: a.jsonl}]", "Source 1 of data.prompts has an unknown key 'path'. A source has source"),
        ("data.prompts=[a.jsonl, {source: b, wieght: 2}]", "Source 2 .* unknown key 'wieght'. A source has source"),
        ("data.prompts=[{source: b, weight: 0}]", "Source 1 .* weight input should be greater than 0"),
        ("data.prompts=[{weight: 1}]", "Source 1 .* source field required"),
    ],
)
def test_recipe_mistakes_are_refused(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("quickstart", [override])
    with pytest.raises(UserError, match=r"data\.revision is 'main', and data.prompts names several sources"):
        load_recipe("quickstart", ["data.prompts=[a.jsonl]", "data.revision=main"])
    with pytest.raises(UserError, match="prompts that the target writes have none"):
        load_recipe("quickstart", ["data.prompts=[self, b.jsonl]", "data.regenerate=false"])


def test_held_out_prompts_keep_their_system_message(tiny_target_folder: Path, tmp_path: Path) -> None:
    system, user = ({"role": role, "content": "Summarise."} for role in ("system", "user"))
    rows = [{"messages": [{**system, "content": f"Text {i}"}, user]} for i in range(6)]
    file = write_rows(tmp_path / "documents.jsonl", *rows)
    sizes = {"conversations": 3, "heldout": 2, "validation": 1, "max_new_tokens": 8}
    recipe = recipe_of(tiny_target_folder, {"prompts": file, **sizes})
    run = Run(recipe, tmp_path / "run", Console(quiet=True))
    execute(run, stages_until("conversations"))
    asked = [question.messages(1) for question in read_questions(run.folder / "data" / "heldout.jsonl")]
    assert len(asked) == 2 and all(messages in [row["messages"] for row in rows] for messages in asked)
