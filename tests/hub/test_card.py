"""The model card: valid metadata, and only measured figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers.dynamic_module_utils import get_imports

from headstart.hub.card import _metadata, write_card
from headstart.hub.format import export_heads
from headstart.model.model import Target
from tests.hub.helpers import RESULTS, TUNING, export, make_heads

FACTS: dict[str, Any] = {
    "measurements": [{"name": "Held-out prompts", "results": RESULTS}],
    "training": {"conversations": 1600, "prompts": "written by the target itself | greedy"},
}


def front_matter(card: str) -> dict[str, Any]:
    _, block, _ = card.split("---\n", 2)
    values = yaml.safe_load(block)
    assert isinstance(values, dict)
    return values


def test_figures_and_settings(tmp_path: Path, tiny_target: Target) -> None:
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, FACTS)
    card = (tmp_path / "h" / "README.md").read_text()
    for text in (
        "Held-out prompts",
        "48 prompts, at most 128 new tokens each, greedy, batch size 1, bfloat16, 2 threads, on A Fast",
        "4 November 2026, 09:07 UTC",
        "| tokens/s, the heads | 71.2 |",
        "1.42x (95 % interval 1.37 to 1.47)",
        "| draft 2 accepted, given the earlier drafts were | 45 % (41–49 %) of 620 rounds |",
        "2, 0 not explained by rounding",
        "written by the target itself \\| greedy",
        tiny_target.identity().fingerprint,
        "headstart generate HEADS",
    ):
        assert text in card
    assert "prompt lookup" not in card, "not measured"
    assert "1.46" not in card.replace("1.4567", "1.46"), "a prediction is not a measurement"


def test_one_prompt_has_no_interval(tmp_path: Path, tiny_target: Target) -> None:
    summary = {**RESULTS["summary"], "speedup_vs_plain": {"mean": 1.07, "low": None, "high": None}}
    facts = {"measurements": [{"name": "One", "results": {**RESULTS, "summary": summary}}]}
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, facts)
    assert "| speed-up over the plain loop | 1.07x |" in (tmp_path / "h" / "README.md").read_text()


def test_default_drafter_is_on_the_card(tmp_path: Path, tiny_target: Target) -> None:
    speedup = {"mean": 1.6, "low": 1.5, "high": 1.7}
    default = {"name": "heads+ngram", "tokens_per_second": 80.25, "speedup_vs_plain": speedup}
    facts = {"measurements": [{"name": "One", "results": {**RESULTS, "compare": [{"name": "heads"}, default]}}]}
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, facts)
    card = (tmp_path / "h" / "README.md").read_text()
    assert "| tokens/s, heads + n-gram (the default drafter) | 80.2 |" in card
    assert "| speed-up of heads + n-gram over the plain loop | 1.60x (95 % interval 1.50 to 1.70) |" in card


def test_card_without_measurements_says_so(tmp_path: Path, tiny_target: Target) -> None:
    export(tmp_path / "h", tiny_target)
    card = (tmp_path / "h" / "README.md").read_text()
    assert "Not measured yet" in card
    assert "tokens/s" not in card
    write_card(tmp_path / "h", FACTS)
    assert "Not measured yet" not in (tmp_path / "h" / "README.md").read_text()


def test_metadata_of_a_packaged_target_and_of_a_hub_model(tmp_path: Path, tiny_target: Target) -> None:
    export(tmp_path / "h", tiny_target)
    values = front_matter((tmp_path / "h" / "README.md").read_text())
    assert (values["license"], values["library_name"]) == ("other", "headstart")
    assert "medusa" in values["tags"]
    assert "base_model" not in values
    assert _metadata("smollm2-135m")["license"] == "apache-2.0"
    values = _metadata("org/model-1.5")
    assert (values["base_model"], values["license"]) == ("org/model-1.5", "other")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("recorded", "requirement"),
    [
        (
            {"url": "https://host/us/headstart.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"headstart @ git+https://host/us/headstart.git@{COMMIT}",
        ),
        (
            {"url": "https://host/headstart.whl", "archive_info": {"hashes": {"sha256": "abc"}}},
            "headstart @ https://host/headstart.whl#sha256=abc",
        ),
        ({"url": "file:///home/me/headstart", "dir_info": {"editable": True}}, None),
        ({"url": "https://host/headstart.whl", "archive_info": {}}, None),
        (None, None),
    ],
)
def test_card_names_a_pinned_installation_or_none(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, recorded: Any, requirement: str | None
) -> None:
    """A package of that name could be anyone's."""
    text = None if recorded is None else json.dumps(recorded)
    installed = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr("headstart.support.provenance.metadata.distribution", lambda _: installed)
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, {})
    files = [file.read_text() for file in (tmp_path / "h").rglob("*") if file.suffix in (".md", ".py", ".txt")]
    commands = [line for file in files for line in file.splitlines() if "pip install" in line]
    assert commands == ([] if requirement is None else [f"pip install '{requirement}'"])
    assert any("from its authors' repository" in file for file in files) == (requirement is None)


def test_transformers_reports_missing_headstart_without_a_package(tmp_path: Path, tiny_target: Target) -> None:
    """transformers checks the imports of this file and suggests to install them by name."""
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, {})
    file = tmp_path / "h" / "custom_generate" / "generate.py"
    assert get_imports(file) == []
    standard_library_alone = [sys.executable, "-I", "-S", file]
    done = subprocess.run(standard_library_alone, capture_output=True, text=True)
    assert "see README.md beside them" in done.stderr and "pip" not in done.stderr


def test_packaged_target_is_described(tmp_path: Path, tiny_target: Target) -> None:
    packaged = Target(tiny_target.model, tiny_target.tokenizer, "smollm2-135m")
    export_heads(tmp_path / "h", make_heads(packaged), packaged, TUNING, {})
    card = (tmp_path / "h" / "README.md").read_text()
    assert "# Draft heads for SmolLM2-135M-Instruct dequantised from Q4_1" in card
    assert 'target.save("MODEL")' in card
    assert "without changing its words" not in card and "near-ties" in card
