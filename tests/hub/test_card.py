"""The model card: valid metadata, the figures that were measured, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headstart.hub.card import _metadata, write_card
from headstart.hub.format import export_heads
from headstart.target.model import Target
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
        "| draft 2 accepted, when those before it were | 45 % |",
        "2, of which 0 not explained by rounding",
        "written by the target itself \\| greedy",
        tiny_target.identity().fingerprint,
        "headstart generate HEADS",
    ):
        assert text in card
    assert "prompt lookup" not in card, "what was not measured is not in the card"
    assert "1.46" not in card.replace("1.4567", "1.46"), "a prediction is not a measurement"


def test_one_prompt_has_no_interval(tmp_path: Path, tiny_target: Target) -> None:
    summary = {**RESULTS["summary"], "speedup_vs_plain": {"mean": 1.07, "low": None, "high": None}}
    facts = {"measurements": [{"name": "One", "results": {**RESULTS, "summary": summary}}]}
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, facts)
    assert "| speed-up over the plain loop | 1.07x |" in (tmp_path / "h" / "README.md").read_text()


def test_the_default_drafter_is_on_the_card(tmp_path: Path, tiny_target: Target) -> None:
    default = {
        "name": "heads+ngram",
        "tokens_per_second": 80.25,
        "speedup_vs_plain": {"mean": 1.6, "low": 1.5, "high": 1.7},
    }
    facts = {"measurements": [{"name": "One", "results": {**RESULTS, "compare": [{"name": "heads"}, default]}}]}
    export_heads(tmp_path / "h", make_heads(tiny_target), tiny_target, TUNING, facts)
    card = (tmp_path / "h" / "README.md").read_text()
    assert "| tokens/s, heads + n-gram (the default drafter) | 80.2 |" in card
    assert "| speed-up of heads + n-gram over the plain loop | 1.60x (95 % interval 1.50 to 1.70) |" in card


def test_without_measurements_it_says_so(tmp_path: Path, tiny_target: Target) -> None:
    export(tmp_path / "h", tiny_target)
    card = (tmp_path / "h" / "README.md").read_text()
    assert "Nothing has been measured yet" in card
    assert "tokens/s" not in card
    write_card(tmp_path / "h", FACTS)
    assert "Nothing has been measured" not in (tmp_path / "h" / "README.md").read_text()


def test_metadata_of_a_packaged_target_and_of_a_hub_model(tmp_path: Path, tiny_target: Target) -> None:
    export(tmp_path / "h", tiny_target)
    values = front_matter((tmp_path / "h" / "README.md").read_text())
    assert (values["license"], values["library_name"]) == ("other", "headstart")
    assert "medusa" in values["tags"]
    assert "base_model" not in values
    config = {"target": {"spec": "smollm2-135m"}, "heads": {"family": "medusa"}}
    assert _metadata(config)["license"] == "apache-2.0"
    config = {"target": {"spec": "org/model-1.5"}, "heads": {"family": "medusa"}}
    values = _metadata(config)
    assert (values["base_model"], values["license"]) == ("org/model-1.5", "other")
