"""The commands that take heads: every drafting and sampling option, comparisons, the audit, and bad values."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headstart.cli import heads as cli_heads
from headstart.cli.app import app
from headstart.cli.options import Loading
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.heads.medusa import MedusaHead
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.support.detokenizer import decode_text
from tests.decode.drafters import broken_trees
from tests.hub.helpers import export
from tests.shipped import ship
from tests.test_cli import call, refused, works
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_target_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "heads"
    export(folder, Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    return folder


@pytest.fixture
def run_folder(heads: Path, tmp_path: Path) -> Path:
    """The folder of a run with heads."""
    folder = tmp_path / "runs" / "mine"
    shutil.copytree(heads, folder / "heads")
    (folder / "recipe.yaml").write_text("name: mine\nheads: {}\n")
    return folder


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["one two one two"]}\n{"turns": ["hello"]}\n')
    return file


def said(heads: Path, *options: object) -> Any:
    return works(
        "generate", heads, "--prompt", "one two one two", "--max-new-tokens", 10, "--dtype", "float32", *options
    )


def test_every_drafter_and_mode_writes_the_same_words(heads: Path) -> None:
    plain = said(heads, "--drafter", "none").stdout
    for options in (
        ("--drafter", "ngram"),
        ("--drafter", "heads+ngram", "--draft", "on"),
        ("--drafter", "early-exit:1"),
        ("--tree", "static"),
        ("--draft", "off"),
        ("--temperature", 1, "--top-k", 1),
        ("--temperature", 1, "--top-p", 0.000001, "--verifier", "greedy_draft"),
        ("--temperature", 1, "--min-p", 1, "--verifier", "greedy_draft"),
    ):
        assert said(heads, *options).stdout == plain, options
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert said(heads, option, 2).stdout != plain
    line = json.loads(said(heads, "--logprobs", 1).stdout)
    assert line["text"] == plain.removesuffix("\n") and [len(one) for one in line["logprobs"]] == [1] * line["tokens"]
    banned = json.dumps(dict.fromkeys(line["logprobs"][0], -100))
    assert said(heads, "--logit-bias", banned).stdout != plain
    (end,) = line["logprobs"][2]
    ended = json.loads(said(heads, "--logprobs", 1, "--stop-token-ids", end).stdout)
    assert ended["logprobs"] == line["logprobs"][: [list(one) for one in line["logprobs"]].index([end]) + 1]


def test_a_run_is_accepted_as_its_heads(heads: Path, run_folder: Path, questions: Path, tmp_path: Path) -> None:
    assert said(run_folder).stdout == said(heads).stdout
    assert "tokens/s" in works("chat", run_folder, "--max-new-tokens", 4, stdin="hello\n\n").stderr
    works("eval", run_folder, "--questions", questions, "--out", tmp_path / "out", "--max-new-tokens", 4, "--limit", 1)
    works("audit", run_folder, "--limit", 1, "--drafters", "static", "--max-new-tokens", 4, "--temperature", 0)
    (run_folder / "heads" / "notes.txt").touch()
    shown = works("push", run_folder, "user/name", "--dry-run").stdout
    assert "Would upload 6 files" in shown and "notes.txt  skipped" in shown


def test_a_run_without_heads_is_refused(run_folder: Path) -> None:
    shutil.rmtree(run_folder / "heads")
    for asked in (
        ("generate", run_folder, "--prompt", "hi"),
        ("chat", run_folder),
        ("audit", run_folder),
        ("push", run_folder, "user/name", "--dry-run"),
    ):
        said = refused(*asked)
        assert f"The run in {run_folder} has no heads yet." in said
        assert f"headstart run {run_folder / 'recipe.yaml'} --run-dir {run_folder}" in said


def test_an_empty_prompt_is_refused_before_anything_is_loaded(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_heads, "load_decoder", None)
    for prompt in ("", "  ", "\n"):
        assert "The prompt is empty." in refused("generate", heads, "--prompt", prompt)


def test_options_are_checked_before_anything_is_loaded(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.api.load", None)
    for command in (("generate", heads, "--prompt", "hi"), ("chat", heads)):
        for option, value, problem in (
            ("--drafter", "headz", "Did you mean 'heads'"),
            ("--top-p", 1.5, "top_p is 1.5"),
            ("--temperature", "inf", "temperature is inf"),
            ("--verifier", "topk", "Did you mean 'top_k'"),
            ("--seed", 1 << 64, "seed is 18446744073709551616"),
        ):
            assert problem in refused(*command, option, value)
    assert "A stop string is empty" in refused("generate", heads, "--prompt", "hi", "--stop", "")


def test_a_prompt_may_come_from_standard_input(heads: Path) -> None:
    asked = ("generate", heads, "--prompt", "-", "--max-new-tokens", 10, "--dtype", "float32")
    assert works(*asked, stdin="one two one two\n").stdout == said(heads).stdout
    empty = call(*asked, stdin="\n")
    assert empty.exit_code == 2 and "The prompt is empty." in empty.stderr


def test_text_that_is_not_utf8_is_refused(heads: Path) -> None:
    for asked in (("chat", heads), ("generate", heads, "--prompt", "-")):
        result = CliRunner().invoke(app, [*map(str, asked)], input=b"\xff\n")
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        assert "Error: Standard input is not UTF-8" in result.stderr
    assert "The prompt is not UTF-8" in refused("generate", heads, "--prompt", "\udcff")
    assert "A stop string is not UTF-8" in refused("generate", heads, "--prompt", "a", "--stop", "\udcff")
    assert "The system prompt is not UTF-8" in refused("chat", heads, "--system", "\udcff")


def test_warns_that_sampling_options_need_a_temperature(heads: Path) -> None:
    idle = said(heads, "--top-p", 0.5, "--top-k", 3)
    assert [idle.stderr.count(f"{name} has no effect without --temp") for name in ("--top-p", "--top-k")] == [1, 1]
    assert idle.stdout == said(heads).stdout
    for options in ((), ("--temperature", 1, "--top-p", 0.5)):
        assert "no effect" not in said(heads, *options).stderr


def test_prints_the_seed_that_repeats_a_sampled_answer(heads: Path) -> None:
    first = said(heads, "--temperature", 1)
    (seed,) = re.findall(r"--seed (\d+)", first.stderr)
    assert said(heads, "--temperature", 1, "--seed", seed).stdout == first.stdout
    assert f"--seed {int(seed) + 1}\n" in said(heads, "--temperature", 1, "--seed", int(seed) + 1).stderr
    assert "seed" not in said(heads).stderr, "greedy text needs none"


def test_says_that_drafting_paused(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "faster here" not in said(heads, "--draft", "on").stderr
    monkeypatch.setattr("headstart.decode.budget.Budget.drafts", property(lambda _: False))
    assert "nothing was drafted: plain decoding was faster here" in said(heads).stderr
    assert "faster here" not in said(heads, "--draft", "off").stderr


def test_chat_reads_no_turn_twice(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []  # per turn: tokens kept, tokens read
    prefill = Target.prefill

    def counted(self: Target, cache: Any, rows: Any, aux_layers: Any = ()) -> Any:
        read.append((cache.lengths[0], len(rows[0])))
        return prefill(self, cache, rows, aux_layers)

    asked = ("chat", heads, "--max-new-tokens", 6, "--dtype", "float32")
    decoder = cli_heads.load_decoder(str(heads), Loading(dtype="float32"))
    monkeypatch.setattr(Target, "prefill", counted)
    told = works(*asked, stdin="hello there\nand then?\n/new\nhello there\n\n").stdout
    first_turn, second_turn, new = read[-3:]
    length = len(decoder.tokens("hello there"))
    assert first_turn == (0, length)
    assert second_turn[0] >= length, "the first question at least; random bytes are encoded otherwise than written"
    assert new == (length - 1, 1), "the same words again"
    assert told.startswith(works("generate", heads, "--prompt", "hello there", *asked[2:]).stdout)


def test_in_a_pipe_chat_writes_its_answers_alone(heads: Path) -> None:
    asked = ("--max-new-tokens", 6, "--dtype", "float32")
    answer = works("generate", heads, "--prompt", "hello", *asked).stdout
    result = works("chat", heads, *asked, stdin="/help\nhello\n\n")
    assert result.stdout == answer
    assert result.stderr.count("/new starts over, /drafts colours") == 2, "at the start, and asked for"
    assert result.stderr.count("tokens/s, τ") == 1


def test_a_target_with_modules_of_its_own_needs_no_heads(questions: Path, heads: Path, tmp_path: Path) -> None:
    tokenizer, folder = tiny_tokenizer(), tmp_path / "target"
    ship("deepseek", folder, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder)
    target = load_target(str(folder), "float32")
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "one two one two"}], add_generation_prompt=True, return_dict=False
    )
    (plain,) = DecodeLoop(target).generate([prompt], DecodeOptions(max_new_tokens=10))
    words = decode_text(target.tokenizer, [token for token in plain.tokens if token not in target.end_tokens])
    for drafter in ("mtp", "mtp:1", "mtp+ngram", "ngram", "lookahead+ngram", f"memory:{tmp_path / 'served'}", "none"):
        assert said(folder, "--drafter", drafter).stdout == words + "\n"
    assert said(heads, "--drafter", "ngram").stdout, "heads stay heads"
    shutil.copytree(heads, tmp_path / "cut")
    (tmp_path / "cut" / "heads.safetensors").unlink()
    lacking = refused("generate", tmp_path / "cut", "--prompt", "hi", "--drafter", "ngram")
    assert "heads.safetensors" in lacking, "and are not taken for a target"
    assert "tokens/s" in works("chat", folder, "--drafter", "mtp", "--max-new-tokens", 4, stdin="hi\n\n").stderr
    asked = ("--questions", questions, "--out", tmp_path / "out", "--max-new-tokens", 6, "--limit", 1)
    works("eval", folder, "--drafter", "mtp", "--compare", "ngram", "--dtype", "float32", *asked)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["settings"]["drafter"] == "mtp"
    assert found["summary"]["divergences"]["count"] == 0
    assert found["summary"]["drafter_error"] is None and found["summary"]["nodes_per_round"] > 1
    again = ("--questions", questions, "--out", tmp_path / "again", "--limit", 1)
    assert "was loaded without heads" in refused("eval", folder, "--drafter", "ngram", "--compare", "all", *again)
    for where, drafter, problem in (
        (folder, "heads+mtp", "holds no heads in headstart's own format"),
        (folder, "memory", "holds no heads in headstart's own format"),
        (heads, "mtp", "has no multi-token-prediction modules"),
        (folder, "mtp:0", "Use 1 to 16"),
    ):
        assert problem in refused("generate", where, "--prompt", "hi", "--drafter", drafter)


def test_eval_compares(heads: Path, questions: Path, tmp_path: Path) -> None:
    asked = ("eval", heads, "--questions", questions, "--out", tmp_path, "--max-new-tokens", 6, "--dtype", "float32")
    shown = works(*asked, "--compare", "ngram,early-exit:1", "--compare", "static").stdout
    assert "over plain" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    names = [row["name"] for row in results["compare"]]
    always = ["heads", "plain", "transformers", "transformers_prompt_lookup", DecodeOptions.drafter]
    assert names == [*always, "ngram", "early-exit:1", "static"]
    asked = (*asked, "--overwrite")
    assert "heads + n-gram" in works(*asked, "--limit", 1).stdout, "the default drafter is measured"
    assert [row["name"] for row in json.loads((tmp_path / "results.json").read_text())["compare"]] == always
    works(*asked, "--limit", 1, "--temperature", 1, "--verifier", "top_k", "--drafter", "ngram")
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert (settings["drafter"], settings["verifier"], settings["temperature"]) == ("ngram", "top_k", 1.0)
    with questions.open("a") as file:
        file.write(json.dumps({"turns": ["three four " * 55]}) + "\n")
    shown = works(*asked, "--limit", 2, "--sweep-batch", "1,2", "--long-context", 512).stdout
    assert re.search(r"Prompts of 512 tokens, heads \+ n-gram: [\d.]+ tokens/s, .* over the plain loop, τ \d", shown)
    found = json.loads((tmp_path / "results.json").read_text())
    for sweep, key, sizes in (("batches", "batch_size", [1, 2]), ("contexts", "prompt_tokens", [512])):
        assert [row[key] for row in found[sweep] if row.get("name") == DecodeOptions.drafter] == sizes, found[sweep]
    works(*asked, "--limit", 1, "--tree", "static", "--top-p", 0.5, "--top-k", 5, "--min-p", 0.1, "--temperature", 0.5)
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert (settings["tree"], settings["top_p"], settings["top_k"], settings["min_p"]) == ("static", 0.5, 5, 0.1)


@pytest.mark.drafter_fails
def test_a_failing_drafter_is_reported(
    heads: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no [drafts] today")

    monkeypatch.setattr(MedusaHead, "depth_logits", fail)
    asked = ("--questions", questions, "--limit", 1, "--out", tmp_path / "out", "--draft", "on")
    shown = works("eval", heads, *asked, "--max-new-tokens", 6, "--compare", "static,ngram").stdout
    for name in ("heads", "static"):
        assert shown.count(f"{name}: a drafter failed (ValueError: no [drafts] today); decoding went on") == 1
    assert shown.count("failed") == 3, "heads+ngram as well"
    page = (tmp_path / "out" / "report.md").read_text()
    assert "heads: a drafter failed (ValueError: no [drafts] today); decoding went on without it." in page
    assert "A drafter failed (ValueError: no [drafts] today)" in said(heads).stderr
    assert not [warning for warning in recwarn if "A drafter failed" in str(warning.message)], "it is said once"
    result = call("audit", heads, "--limit", 1, "--drafters", "static", "--temperature", 0, "--max-new-tokens", 4)
    assert result.exit_code == 1 and "the drafter failed (ValueError: no [drafts] today)" in result.stdout


def test_audit_ends_clean_and_leaves_evidence(heads: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    asked = ("audit", heads, "--questions", questions, "--limit", 2, "--samples", 60, "--max-new-tokens", 6)
    shown = works(
        *asked, "--drafters", "static,always wrong", "--temperature", 1, "--verifier", "top_k,greedy_draft"
    ).stdout
    assert "Clean: " in shown
    works(*asked, "--drafters", "ngram", "--temperature", 0, "--top-p", 0.5, "--out", out)
    found = json.loads((out / "audit.json").read_text())
    assert found["clean"] and found["sampling"] == []
    assert [row["drafter"] for row in found["greedy"]] == ["ngram", "ngram"]
    assert found["environment"]["dtype"] == "float32"
    assert "one two one two" in found["prompts"][0]
    assert (out / "audit.md").is_file()


def test_an_audit_that_finds_something_fails(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("audit", heads, "--limit", 1, "--max-new-tokens", 4, "--drafters", "static", "--temperature", 0)
    works(*asked)
    # A target is checked when it is loaded: break it after that.
    load, broken = cli_heads.load_decoder, broken_trees(Target.forward_tree)

    def load_then_break(*arguments: Any) -> Any:
        decoder = load(*arguments)
        monkeypatch.setattr(Target, "forward_tree", broken)
        return decoder

    monkeypatch.setattr(cli_heads, "load_decoder", load_then_break)
    result = call(*asked, "--out", tmp_path)
    assert result.exit_code == 1
    assert "Not clean" in result.stdout
    assert "tokens differ" in result.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["clean"] is False


def test_bad_values_are_refused(heads: Path, questions: Path, tmp_path: Path) -> None:
    speak = ("generate", heads, "--prompt", "hi")
    assert "Tune them: headstart tune" in refused(*speak, "--tree", "dynamic")
    assert "min_p is -1" in refused(*speak, "--min-p", -1)
    assert "repetition_penalty is 0" in refused(*speak, "--repetition-penalty", 0)
    assert (
        "'--presence-penalty': Input should be less than or equal to 2" in call(*speak, "--presence-penalty", 3).output
    )
    measure = ("eval", heads, "--questions", questions, "--out", tmp_path / "out")
    assert "Did you mean 'ngram'" in refused(*measure, "--compare", "ngrm")
    assert "top_p is 0" in refused(*measure, "--top-p", 0)
    assert not (tmp_path / "out").exists()
    assert "Did you mean 'ngram'" in refused("audit", heads, "--drafters", "ngrm")
    assert "Did you mean 'greedy_draft'" in refused("audit", heads, "--verifier", "greedydraft")
    assert "missing.jsonl" in refused("audit", heads, "--questions", tmp_path / "missing.jsonl")


def test_a_target_without_a_chat_template_continues_texts_with_raw(tiny_target: Target, tmp_path: Path) -> None:
    """Every command with a prompt refuses before it answers, and takes --raw."""
    base, heads = tmp_path / "base", tmp_path / "heads"
    tiny_target.model.save_pretrained(base)
    tiny_tokenizer(None).save_pretrained(base)
    export(heads, load_target(str(base), "float32"))
    asked = ("--max-new-tokens", 4, "--dtype", "float32")
    audited = ("--limit", 1, "--drafters", "static", "--temperature", 0)
    commands = {
        ("generate", heads, "--prompt", "the user", *asked): "",
        ("race", heads, "--prompt", "the user", *asked): "",
        ("chat", heads, *asked): "the user\n\n",
        ("audit", heads, *asked, *audited): "",
    }
    answers = {}
    for command, stdin in commands.items():
        result = call(*command, stdin=stdin)
        assert result.exit_code == 2 and not result.stdout
        assert "has no chat template" in result.stderr and "--raw" in result.stderr and "/new" not in result.stderr
        answers[command[0]] = works(*command, "--raw", stdin=stdin).stdout
    assert answers["chat"] == answers["generate"], "no other prompt"
    assert "without a system prompt" in refused("chat", heads, "--raw", "--system", "Be brief.")
