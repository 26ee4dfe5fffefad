"""Push and fetch over HTTP, with the real client in a separate process against the fake Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import headstart
from headstart.data.conversations.records import Conversation, write_conversations
from headstart.data.prompts.questions import SUITES, Question
from headstart.hub.format import export_heads
from headstart.hub.push import push
from headstart.model.model import Target
from tests.data.test_suites import FILES as SUITE_FILES
from tests.hub.client import Client
from tests.hub.fake_hub import READ_TOKEN, FakeHub, Repo
from tests.hub.helpers import TUNING, export, make_heads

FILES = [
    "README.md",
    "calibration.json",
    "config.json",
    "custom_generate/generate.py",
    "heads.safetensors",
    "tree.json",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    folder = tmp_path_factory.mktemp("export") / "heads"
    export(folder, tiny_target)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").write_text("not for the Hub")
    return folder


def test_pushed_heads_come_back_and_decode(
    hub: FakeHub, client: Client, folder: Path, tiny_target: Target, tiny_target_folder: Path
) -> None:
    done = client.call("push", folder=str(folder), repo_id="user/heads")
    assert done["commit"] == hub.repos["user/heads"].refs["main"]
    assert done["url"].endswith("/user/heads")
    assert [name for name, _ in done["files"]] == FILES
    pushed = hub.repos["user/heads"].commits[done["commit"]]
    assert pushed == {name: (folder / name).read_bytes() for name in FILES}
    assert not hub.repos["user/heads"].private

    fetched = client.call("fetch", token=None, repo_id="user/heads")
    assert fetched["files"] == FILES
    assert all((Path(fetched["folder"]) / name).read_bytes() == content for name, content in pushed.items())

    answer = client.call("generate", heads="user/heads", target=str(tiny_target_folder), prompt="Hello")
    plain = headstart.load(folder, target=tiny_target).generate("Hello", max_new_tokens=12, drafter="none")
    assert answer == {"tokens": plain.tokens, "nodes": 4}


def test_only_own_files_without_local_paths_are_uploaded(
    hub: FakeHub, client: Client, tmp_path: Path, tiny_target: Target, tiny_target_folder: Path
) -> None:
    """Heads of a target in a local folder, trained on a local file, with other files beside them."""
    folder, prompts = tmp_path / "heads", tmp_path / "secret-project" / "prompts.jsonl"
    here = Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder))
    export_heads(folder, make_heads(here), here, TUNING, {"training": {"prompts": str(prompts), "steps": "4 of 4"}})
    for name in ("notes.txt", ".env", "custom_generate/notes.py", "checkpoint/optimizer.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    assert str(tiny_target_folder) in (folder / "config.json").read_text(), "the local folder names the target's path"

    done = client.call("push", folder=str(folder), repo_id="user/local")
    pushed = hub.repos["user/local"].commits[done["commit"]]
    assert sorted(pushed) == sorted(FILES) == sorted(name for name, _ in done["files"])
    assert done["left_out"] == [".env", "checkpoint/", "custom_generate/notes.py", "notes.txt"]
    assert {name: len(content) for name, content in pushed.items()} == dict(done["files"])
    for name, content in pushed.items():
        for path in (tmp_path, tiny_target_folder, tiny_target_folder.parent):
            assert str(path).encode() not in content, name
    assert b"| prompts | prompts.jsonl |" in pushed["README.md"]
    config = json.loads(pushed["config.json"])
    assert config["target"] == {**json.loads((folder / "config.json").read_text())["target"], "spec": ""}
    assert config["training"] == {"prompts": "prompts.jsonl", "steps": "4 of 4"}

    asked = {"heads": "user/local", "prompt": "Hello"}
    assert client.call("generate", target=str(tiny_target_folder), **asked)["nodes"] == 4
    assert f"belong to {tiny_target_folder.name}" in client.refusal("generate", target=None, **asked)


def test_transformers_decodes_with_heads_on_the_hub(client: Client, folder: Path, tiny_target_folder: Path) -> None:
    commit = client.call("push", folder=str(folder), repo_id="user/my-heads-0.1")["commit"]
    target = str(tiny_target_folder)
    for options in ({}, {"revision": commit}, {"drafter": "none"}):
        answer = client.call("transformers", heads="user/my-heads-0.1", target=target, tokens=[9, 40, 12], **options)
        assert answer == {"same": True, "attention": "sdpa"}
    other = {"heads": "user/my-heads-0.1", "target": target, "tokens": [9] * 4000}
    assert "context of 1024" in client.refusal("transformers", **other)


def test_revisions(hub: FakeHub, client: Client, folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    first = client.call("push", folder=str(folder), repo_id="user/versions")["commit"]
    hub.repos["user/versions"].refs["v1"] = first
    export(tmp_path / "second", tiny_target, num_layers=2)
    second = client.call("push", folder=str(tmp_path / "second"), repo_id="user/versions")["commit"]
    assert first != second
    newest = tmp_path / "second"
    for revision, source in (("v1", folder), (first, folder), ("main", newest), (None, newest)):
        fetched = client.call("fetch", repo_id="user/versions", revision=revision)
        assert (Path(fetched["folder"]) / "config.json").read_bytes() == (source / "config.json").read_bytes()
    before = dict(hub.repos["user/versions"].refs)
    for _ in range(2):  # the branch may exist already
        options = {"revision": "longer", "message": "Trained for a day"}
        third = client.call("push", folder=str(folder), repo_id="user/versions", **options)["commit"]
        assert hub.repos["user/versions"].refs == {**before, "longer": third}
        assert hub.repos["user/versions"].messages[third] == "Trained for a day"
    assert "no revision 'v9'" in client.refusal("fetch", repo_id="user/versions", revision="v9")


def test_conversations_become_a_dataset(hub: FakeHub, client: Client, tmp_path: Path, tiny_target_folder: Path) -> None:
    run = tmp_path / "run"
    (run / "data" / "conversations").mkdir(parents=True)
    assert "has no conversations" in client.refusal("push_conversations", run=str(run), repo_id="user/texts")
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for split in ("train", "validation", "heldout"):
        texts = [Conversation(split, [5, 6, 7], [False, True, True], messages)]
        write_conversations(run / "data" / "conversations" / f"{split}.jsonl", texts)
    (run / "recipe.yaml").write_text(f"name: mine\ntarget: {tiny_target_folder}\nheads: {{family: medusa}}\n")
    options = {"revision": "second", "message": "Again"}
    done = client.call("push_conversations", run=str(run), repo_id="user/texts", **options)
    repo = hub.repos["user/texts"]
    assert done["commit"] == repo.refs["second"] != repo.refs["main"]
    pushed = repo.commits[done["commit"]]
    assert sorted(pushed) == ["README.md", "train.jsonl", "validation.jsonl"], "held-out prompts stay local"
    assert pushed["train.jsonl"] == (run / "data" / "conversations" / "train.jsonl").read_bytes()
    card = pushed["README.md"].decode()
    assert "path: train.jsonl" in card and tiny_target_folder.name in card and str(tiny_target_folder) not in card
    assert ("POST", "/api/datasets/user/texts/commit/second") in hub.calls


def test_private(hub: FakeHub, client: Client, folder: Path) -> None:
    client.call("push", folder=str(folder), repo_id="user/secret", private=True)
    assert hub.repos["user/secret"].private
    assert "it is private" in client.refusal("fetch", token=None, repo_id="user/secret")
    assert client.call("fetch", token=READ_TOKEN, repo_id="user/secret")["files"] == FILES
    client.call("push", folder=str(folder), repo_id="user/secret", private=True)
    client.call("push", folder=str(folder), repo_id="user/open")
    commits = len(hub.repos["user/open"].commits)
    assert "is public" in client.refusal("push", folder=str(folder), repo_id="user/open", private=True)
    assert len(hub.repos["user/open"].commits) == commits, "nothing was uploaded"


def test_whole_model_is_not_downloaded(hub: FakeHub, client: Client) -> None:
    hub.repos["user/model"] = Repo()
    hub.repos["user/model"].commit({"config.json": b"{}", "model.safetensors": b"0" * 1000})
    assert client.call("fetch", repo_id="user/model")["files"] == ["config.json"]


def test_gated(hub: FakeHub, client: Client) -> None:
    hub.repos["user/gated"] = Repo(gated=True)
    assert "access has to be granted" in client.refusal("fetch", repo_id="user/gated")


def test_dry_run_sends_nothing(hub: FakeHub, folder: Path) -> None:
    before = len(hub.calls)
    planned = push(folder, "user/new", dry_run=True)
    assert planned.files == tuple((name, (folder / name).stat().st_size) for name in FILES)
    assert (planned.url, planned.commit) == ("", "")
    assert len(hub.calls) == before
    assert "user/new" not in hub.repos


def test_refusals_name_the_remedy(client: Client, folder: Path, tmp_path: Path, tiny_target_folder: Path) -> None:
    heads = {"folder": str(folder), "repo_id": "user/x"}
    assert "hf auth login" in client.refusal("push", token=None, **heads)
    assert "does not accept the token" in client.refusal("push", token="hf_wrong", **heads)
    assert "write access" in client.refusal("push", token=READ_TOKEN, **heads)
    assert "write access" in client.refusal("push", folder=str(folder), repo_id="somebody/x")
    for bad in ("heads", "a/b/c", "user/", "user/white space", ""):
        assert "user/name" in client.refusal("push", folder=str(folder), repo_id=bad)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "README.md").unlink()
    assert "has no README.md" in client.refusal("push", folder=str(bare), repo_id="user/x")
    assert "No folder" in client.refusal("push", folder=str(tmp_path / "none"), repo_id="user/x")
    assert "no such repository" in client.refusal("fetch", repo_id="user/none")
    assert "not a Hub id" in client.refusal("fetch", repo_id="user//none")
    load = {"target": str(tiny_target_folder), "prompt": "Hi"}
    missing = client.refusal("generate", heads="runs/quickstart", **load)
    assert "No folder runs/quickstart here." in missing
    assert "no such repository" in missing
    assert "No folder at ./none" in client.refusal("generate", heads="./none", **load)
    assert "is a folder here" in client.refusal("generate", heads=str(folder), revision="v1", **load)


def test_no_network(hub: FakeHub, client: Client, folder: Path) -> None:
    client.call("push", folder=str(folder), repo_id="user/kept")
    kept = client.call("fetch", repo_id="user/kept")
    with hub.down():
        assert "cannot be reached" in client.refusal("push", folder=str(folder), repo_id="user/kept")
        assert "cannot be reached" in client.refusal("fetch", repo_id="user/other")
        assert client.call("fetch", repo_id="user/kept") == kept, "from the cache"


def test_target_without_a_network(hub: FakeHub, client: Client, tiny_target_folder: Path) -> None:
    """One error at once, where the Hub client would retry for most of a minute."""
    model = {path.name: path.read_bytes() for path in tiny_target_folder.iterdir()}
    hub.repos["user/target"] = Repo()
    hub.repos["user/target"].commit(model)
    loaded = client.call("target", spec="user/target")
    before = client.errors.read_text()
    with hub.down():
        gone = client.refusal("target", spec="user/gone")
        assert "Cannot load the target 'user/gone': the Hub cannot be reached" in gone
        assert client.call("target", spec="user/target") == loaded, "from the cache"
    assert client.errors.read_text() == before
    assert "no such repository" in client.refusal("target", spec="user/gone")


def test_question_sets_are_read_as_published(hub: FakeHub, client: Client) -> None:
    (part,) = SUITES["gsm8k"]
    with hub.down():
        line = client.refusal("suite", name="gsm8k")
    assert "Cannot fetch main/test-00000-of-00001.parquet of gsm8k from 'openai/gsm8k'" in line
    assert line.endswith(f"/datasets/openai/gsm8k/resolve/main/{part.file} as {part.local_copy}.")
    for dataset in dict.fromkeys(dataset for dataset, _ in SUITE_FILES):
        hub.repos[dataset] = Repo()
        hub.repos[dataset].commit({file: content for (name, file), content in SUITE_FILES.items() if name == dataset})
    for part in SUITES["speed-bench"]:  # the commit that is read, whatever comes later
        hub.repos[part.dataset].refs[str(part.revision)] = hub.repos[part.dataset].refs["main"]
    hub.repos["nvidia/SPEED-Bench"].commit({"README.md": b"moved"})
    line = client.refusal("suite", name="speed-bench")
    assert "speed-bench, question rag1: only a placeholder" in line and "prepare.py | python3" in line
    found = {
        name: client.call("suite", name=name, limit=11 if name == "speed-bench" else None)["questions"]
        for name in SUITES
    }
    asked = {name: [Question(**question) for question in questions] for name, questions in found.items()}
    assert asked["mt-bench"] == [
        Question("81", "writing", ["Write.", "Again."]),
        Question("111", "math", ["What is 1 + 1?", "And 2 + 2?"]),
    ]
    assert asked["humaneval"] == [Question("HumanEval/0", "code", ["def one():\n"])]
    assert len(asked["gsm8k"]) == 80 and asked["gsm8k"][1] == Question("math-2", "math", ["How many are 1?"])
    assert asked["alpaca"][0] == Question("instructions-1", "instructions", ["Translate.\n\nHaus"])
    assert asked["alpaca"][1].turns == ["Greet."]
    assert len({question.question_id for question in asked["spec-bench"]}) == 12
    assert asked["spec-bench"][0] == asked["mt-bench"][0] and asked["spec-bench"][1].category == "translation"
    assert len(asked["speed-bench"]) == 11 and asked["speed-bench"][1] == Question(
        "humanities0", "humanities", ["One.", "Two."]
    )
    assert [(each.category, each.turns) for each in asked["speed-bench-8k"][:2]] == [
        ("low_entropy", ["Of 8k."]),
        ("mixed", ["Of 8k."]),
    ]
    few = client.call("suite", name="spec-bench", limit=6)["questions"]
    assert len({question["category"] for question in few}) == 6, "some from each part"
    assert len(client.call("suite", name="gsm8k", limit=85)["questions"]) == 85
    with hub.down():
        assert client.call("suite", name="mt-bench")["questions"] == [vars(each) for each in asked["mt-bench"]]
