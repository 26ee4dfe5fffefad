"""The audit of a serving engine: an honest one is clean, and each planted fault is found and named."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headstart.data.prompts.chat import prompt_tokens
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.eval import audit_engine
from headstart.eval.audit import PROMPTS
from headstart.eval.audit_conditions import Text, accepted_drafts, conditions
from headstart.heads.base import DraftHead, HeadBatch, family, make_config
from headstart.hub.engines.export import export_for
from headstart.hub.engines.importing import untuned
from headstart.hub.format import export_heads
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.servers.client import Endpoint
from headstart.servers.completions import LlamaServer
from rehearsal.engine_http import StandIn
from rehearsal.stand_in import Writer
from tests.data.http_server import Reply, http_server
from tests.engines.conftest import Made
from tests.engines.test_serving import FAKE
from tests.test_cli import call, refused, works

QUESTIONS, TOKENS = 5, 20
SETTINGS = {
    "family": "eagle3",
    "draft_steps": 3,
    "aux_layers": (3, 4, 7),
    "init": "random",
    "feedback": "post_norm",
    "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},  # short texts depend on positions
}


def learn(target: Target, heads: DraftHead) -> None:
    """Train the heads on the target's answers to the audit's questions, by the difference of two layers' states."""
    prompts = [prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in PROMPTS[:QUESTIONS]]
    answers = DecodeLoop(target).generate(prompts, DecodeOptions(TOKENS + 3, ignore_end=True))
    batches = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens_1T = torch.tensor([Text(tuple(prompt), tuple(answer.tokens)).tokens])
        states = target.hidden_states(tokens_1T.tolist(), heads.aux_layers)[0]
        supervised_1T = torch.arange(tokens_1T.shape[1])[None] >= len(prompt)
        batches.append(
            HeadBatch(tokens_1T, supervised_1T, {layer: each[None].clone() for layer, each in states.items()})
        )
    fusion = heads.get_submodule("fc").weight
    with torch.no_grad():
        square = torch.randn(64, 64) / 2
        fusion.copy_(torch.cat([square, -square, torch.zeros(64, 64)], 1))
    fusion.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in heads.parameters() if each.requires_grad], lr=3e-3)
    for _ in range(45):
        loss = torch.zeros(())
        for batch in batches:
            for step in heads.unroll(batch):
                loss = loss + F.cross_entropy(step.logits_MD, batch.tokens_BT.flatten()[step.teacher_M + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited") / "heads"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = make_config(SETTINGS, target)
        made = family(config.family)(config)
        made.bind(target)
        learn(target, made)
    export_heads(folder, made.eval().requires_grad_(False), target, untuned(made), {})
    return folder


@pytest.fixture(scope="module")
def exported(heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_for(heads, tmp_path_factory.mktemp("served") / "vllm", "vllm", dtype="float32").folder


@contextmanager
def running(stand_in: StandIn) -> Iterator[str]:
    """Serve in this process."""

    def reply(path: str, headers: Mapping[str, str], body: Any) -> Reply:
        page = stand_in.page(path) if body is None else stand_in.reply(path, body)
        if page is not None and body is not None and body.get("stream"):
            events = "".join(f"data: {json.dumps(event)}\n\n" for event in stand_in.events(page))
            return Reply(200, events, {"Content-Type": "text/event-stream"})
        return Reply(404, "") if page is None else Reply(200, page)

    with http_server(reply) as url:
        yield url


def audit(heads: Path, url: str, out: Path, *more: object) -> dict[str, Any]:
    """Return audit.json, after checking that the exit code and the page agree with it."""
    options = ("--limit", QUESTIONS, "--max-new-tokens", TOKENS, "--dtype", "float32", "--out", out, *more)
    done = call("audit", heads, "--engine", url, *options)
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads((out / "audit.json").read_text())
    assert done.exit_code == (0 if found["clean"] else 1)
    page = (out / "audit.md").read_text()
    assert all(problem in page for problem in found["problems"]) and url in page
    return found


def plant(target: Target, heads: Path, exported: Path, out: Path, fault: str) -> dict[str, Any]:
    with running(Writer(target, exported, 3, fault).serving("vllm", "target")) as url:
        return audit(heads, url, out, "--engine-requests", 1)


def test_honest_engine_is_clean_at_every_load(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    with running(Writer(target, exported, 3).serving("vllm", "target")) as url:
        found = audit(heads, url, tmp_path, "--engine-requests", "1,2")
    assert found["clean"] and found["engine"]["name"] == "vllm 0.0"
    assert found["engine"]["conditions"] and not any(row["explains"] for row in found["engine"]["conditions"])
    assert [row["requests"] for row in found["engine"]["tokens"]] == [1, 2]
    assert [row["tokens"] for row in found["engine"]["tokens"]] == [5 * TOKENS, 10 * TOKENS], "at least five batches"
    assert found["engine"]["prompts"] == {"prompts": QUESTIONS, "different": 0, "problem": None}
    for row in found["engine"]["acceptance"]:
        assert row["by_position"] == row["expected_by_position"] and row["by_position"][0] > 0.4
        assert row["distance"] == 0 and row["change"] == {"mean": 0.0, "low": 0.0, "high": 0.0}, (
            "the replay counts exactly as the engine does"
        )


@pytest.mark.parametrize("drafts", [2, 3])
def test_replay_counts_as_an_engine_that_does_not_draft_past_the_end(
    target: Target, heads: Path, exported: Path, tmp_path: Path, drafts: int
) -> None:
    with running(Writer(target, exported, drafts).serving("llama.cpp", "target")) as url:
        found = audit(heads, url, tmp_path, "--engine-requests", 1)
    (row,) = found["engine"]["acceptance"]
    assert found["clean"] and row["drafts"] == drafts and found["engine"]["name"] == "llama.cpp b0"
    assert row["by_position"] == row["expected_by_position"] and row["rounds"] == row["expected_rounds"]
    assert found["engine"]["prompts"]["prompts"] == 0, "it does not report its template"


def test_totals_of_replies_are_compared_without_a_page_of_counters(
    target: Target, heads: Path, exported: Path, tmp_path: Path
) -> None:
    stand_in = Writer(target, exported, 3).serving("llama.cpp", "target")
    stand_in.drafts = 0  # its page is empty
    with running(stand_in) as url:
        found = audit(heads, url, tmp_path, "--engine-requests", 1)
    (row,) = found["engine"]["acceptance"]
    assert found["clean"] and row["drafts"] == 3 and row["by_position"] == []
    assert row["tokens_per_round"] == row["expected_tokens_per_round"] > 1.5


@pytest.mark.parametrize(
    ("fault", "condition"),
    [
        ("layer ids - 1", "reads each layer before the trained one"),
        ("layer ids + 1", "reads each layer after the trained one"),
        ("rotary base", "uses the rotary base 10000"),
        ("norm_output", "ignores norm_output"),
    ],
)
def test_planted_condition_is_named(
    target: Target, heads: Path, exported: Path, tmp_path: Path, fault: str, condition: str
) -> None:
    found = plant(target, heads, exported, tmp_path, fault)
    (problem,) = found["problems"]
    assert f"An engine that {condition} gives" in problem and "likely cause" in problem
    nearest = found["engine"]["conditions"][0]
    assert nearest["condition"] == condition and nearest["distance"] == 0
    assert nearest["by_position"] == found["engine"]["acceptance"][0]["by_position"]
    assert found["engine"]["tokens"][0]["problem"] is None, "greedy text stays the target's"


@pytest.mark.parametrize(
    ("case", "names", "not_names"),
    [
        ("eagle", ["reads the state before the final norm", "uses the rotary base 500000"], "norm_"),
        ("medusa", ["reads the state before the final norm", "reads the state of the token before"], "norm_"),
        (
            "eagle3-deep",
            ["reads the last layer after the final norm", "ignores aux_norms", "ignores norm_output"],
            "qk_norm",
        ),
        ("peagle", ["feeds drafts back instead of drafting in parallel", "sets norm_before_residual"], "norm_output"),
        ("eagle3-qk-norm", ["reads the default layers 2, 4, 5", "ignores qk_norm"], "ignores norm_"),
        ("dflash-deep", ["ignores the sliding window", "reads each layer after the trained one"], "norm_"),
        ("dspark", ["ignores causal", "ignores the sliding window"], "norm_"),
    ],
)
def test_every_layout_has_its_conditions(
    made: Made, target: Target, case: str, names: list[str], not_names: str
) -> None:
    heads, text = made(case)[0], Text((5, 6, 7), (8, 9, 10, 11, 12), (13, 14, 15, 16))
    tried = conditions(heads, target)
    assert set(names) <= {each.name for each in tried} and len({each.name for each in tried}) == len(tried)
    assert not any(not_names in each.name and each.name not in names for each in tried)
    read = target.hidden_states([text.tokens], [FINAL, *range(9)])[0]
    for each in tried:
        accepted = accepted_drafts(each, read, text)
        assert len(accepted) == len(text.tokens) and max(accepted) <= heads.draft_steps


def test_unknown_cause_is_left_open(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    stand_in = Writer(target, exported, 3).serving("vllm", "target")
    answer = stand_in.answer

    def forgetful(*asked: Any) -> Any:
        """Accept only half of the drafts."""
        before = list(stand_in.accepted)
        written = answer(*asked)
        kept = [(now - then + 1) // 2 for now, then in zip(stand_in.accepted, before, strict=True)]
        stand_in.rounds += sum(stand_in.accepted) - sum(before) - sum(kept)
        stand_in.accepted[:] = [then + more for then, more in zip(before, kept, strict=True)]
        return written

    stand_in.answer = forgetful
    with running(stand_in) as url:
        found = audit(heads, url, tmp_path, "--engine-requests", 1)
    (problem,) = found["problems"]
    assert "usual errors explains it" in problem
    assert not any(row["explains"] for row in found["engine"]["conditions"])


def test_condition_that_costs_nothing_in_total_is_named(
    target: Target, heads: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_engine, "MATTERS", 1.0)  # any change in total passes
    (problem,) = plant(target, heads, exported, tmp_path, "layer ids - 1")["problems"]
    assert "as expected, but in other rounds" in problem
    assert "An engine that reads each layer before the trained one gives" in problem


def test_other_tokens_are_found(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    found = plant(target, heads, exported, tmp_path, "tokens")
    problem = found["problems"][0]
    assert f"{QUESTIONS} of {QUESTIONS * TOKENS} tokens are not the target's" in problem
    assert f"token {TOKENS - 1} of an answer to prompt 0" in problem and "rounding explains 0.00" in problem
    (row,) = found["engine"]["tokens"]
    assert row["unexplained"] == QUESTIONS and row["largest_margin"] > row["margin_limit"]
    assert all(each["position"] == TOKENS - 1 and each["margin"] > 0 for each in row["differences"])


def test_other_chat_template_is_found(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    (problem,) = plant(target, heads, exported, tmp_path, "template")["problems"]
    assert f"renders {QUESTIONS} of {QUESTIONS} chat prompts differently" in problem and "system" in problem
    assert "--default-chat-template-kwargs" in problem


def test_engine_without_drafts_is_found(target: Target, heads: Path, tmp_path: Path) -> None:
    with running(Writer(target, Path(), 0).serving("vllm", "target")) as url:
        (problem,) = audit(heads, url, tmp_path, "--engine-requests", 1)["problems"]
    assert "drafts nothing" in problem


def test_longer_chain_than_trained_is_found(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    stand_in = Writer(target, exported, 3).serving("vllm", "target")
    stand_in.drafts = 4  # as it counts
    with running(stand_in) as url:
        (problem,) = audit(heads, url, tmp_path, "--engine-requests", 1)["problems"]
    assert "drafts 4 tokens; these heads draft at most 3" in problem


def test_schedule_of_drafts_is_not_compared(target: Target, heads: Path, exported: Path, tmp_path: Path) -> None:
    stand_in = Writer(target, exported, 3, "norm_output").serving("vllm", "target")
    counters = stand_in.metrics

    def fewer() -> str:
        """Count as if some rounds had had fewer drafts."""
        return re.sub(
            r"(num_draft_tokens_total\S* )(\S+)", lambda found: found[1] + f"{0.9 * float(found[2])}", counters()
        )

    stand_in.metrics = fewer  # type: ignore[method-assign]
    with running(stand_in) as url:
        found = audit(heads, url, tmp_path, "--engine-requests", 1)
    (row,) = found["engine"]["acceptance"]
    assert found["clean"] and row["rounds"] > 0 and row["change"] is None and found["engine"]["conditions"] == []


def test_named_engine_is_started_with_the_heads(heads: Path, tmp_path: Path) -> None:
    """The fake engine counts up from 7, which is not what the target writes."""
    command = shlex.join([sys.executable, str(FAKE), "vllm", "none"])
    options = (
        "--engine-command",
        command,
        "--engine-requests",
        2,
        "--out",
        tmp_path,
        "--limit",
        2,
        "--max-new-tokens",
        8,
    )
    done = call("audit", heads, "--engine", "vllm", *options)
    found = json.loads((tmp_path / "audit.json").read_text())
    assert done.exit_code == 1 and "are not the target's" in found["problems"][0]
    assert "größe in the dtype of its files" in found["problems"][0]
    assert "--speculative-config" in found["engine"]["where"] and str(FAKE) in found["engine"]["where"]


def test_engine_of_another_vocabulary_is_refused(target: Target, heads: Path) -> None:
    with running(StandIn("vllm", lambda prompt, most, body: ([5, target.vocab_size], {}))) as url:
        problem = refused("audit", heads, "--engine", url, "--engine-requests", 1, "--limit", 1)
    assert f"vllm 0.0 wrote token {target.vocab_size}" in problem and "Serve the target of the heads" in problem


def test_llama_server_renders_and_tokenizes_in_two_requests() -> None:
    def reply(path: str, headers: Mapping[str, str], body: Any) -> Reply | None:
        if path == "/apply-template":
            return Reply(200, {"prompt": f"<user>{body['messages'][0]['content']}"})
        assert path == "/tokenize" and not body["add_special"]
        return Reply(200, {"tokens": list(map(ord, body["content"]))})

    with http_server(reply) as url:
        prompt = LlamaServer().chat_prompt(Endpoint(url), [{"role": "user", "content": "hi"}], "")
    assert prompt == list(map(ord, "<user>hi"))


def test_bad_options_are_refused(heads: Path) -> None:
    nothing = "http://127.0.0.1:9"
    assert "does not answer" in refused("audit", heads, "--engine", nothing)
    assert "start an engine, but this one runs" in refused(
        "audit", heads, "--engine", nothing, "--engine-arguments", "--x"
    )
    assert "--samples is for headstart's own loop" in refused("audit", heads, "--engine", nothing, "--samples", 9)
    assert "without an engine" in refused("audit", heads, "--engine-requests", 2)
    assert "--engine-requests is '0'" in refused("audit", heads, "--engine", nothing, "--engine-requests", 0)
    assert "Did you mean 'vllm'" in refused("audit", heads, "--engine", "vlm")
    assert "headstart audit" in works("audit", "--help").stdout
