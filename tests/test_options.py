"""The options of decoding are defined once: everything that takes them takes the same."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from headstart.cli import heads as cli_heads
from headstart.cli.options import with_options
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import Sampling
from headstart.decode.verify import RULES
from headstart.drafters.catalog import DRAFTERS
from headstart.eval.measure import EvalOptions
from headstart.hf_generate.call import CustomGenerate
from headstart.hf_generate.request import _WARPERS
from headstart.options import DraftingOptions, GenerateKeywords, GenerateOptions, LoopOptions, SamplingOptions, meaning


def test_keyword_arguments_are_the_options() -> None:
    assert get_type_hints(GenerateKeywords) == get_type_hints(GenerateOptions)


@pytest.mark.parametrize("of", [GenerateOptions, EvalOptions, DecodeOptions, Sampling])
def test_whoever_takes_options_has_their_defaults(of: type[Any]) -> None:
    defaults = {one.name: one.default for one in fields(of)}
    for one in fields(SamplingOptions if of is Sampling else LoopOptions):
        assert defaults[one.name] == one.default != MISSING


def test_the_loop_is_asked_for_what_the_caller_asked_for() -> None:
    unusual: dict[str, Any] = {one.name: f"{one.name}!" for one in fields(LoopOptions)}
    asked = DecodeOptions.of(DraftingOptions(**unusual), ignore_end=True)
    assert asdict(asked) | unusual == asdict(asked) and asked.ignore_end
    of_sampling = {one.name: f"{one.name}!" for one in fields(SamplingOptions)}
    assert asdict(asked.sampling) | of_sampling == asdict(asked.sampling)


def test_every_option_has_a_meaning_and_the_class_shows_it() -> None:
    for one in fields(GenerateOptions):
        text = meaning(GenerateOptions, one.name).text
        assert text and f"{one.name}: {text}" in (GenerateOptions.__doc__ or "")


def test_the_words_to_choose_from_are_those_there_are() -> None:
    assert all(name in meaning(LoopOptions, "verifier").text for name in RULES)
    assert all(name in meaning(DraftingOptions, "drafter").text for name in DRAFTERS)


def test_transformers_callers_give_options_by_the_same_names() -> None:
    taken = inspect.signature(CustomGenerate.__call__).parameters
    for name in ("drafter", "tree", "draft", "verifier"):
        assert taken[name].default == getattr(GenerateOptions, name)
    assert {name for _, name in _WARPERS} < {one.name for one in fields(SamplingOptions)}


def test_commands_take_every_option_that_can_be_typed() -> None:
    typed = {one.name for one in fields(DraftingOptions)}
    for command in (cli_heads.generate, cli_heads.chat, cli_heads.evaluate):
        assert typed <= inspect.signature(command).parameters.keys()
    assert "processors" not in inspect.signature(cli_heads.generate).parameters
    assert inspect.signature(cli_heads.chat).parameters["max_new_tokens"].default == 512


def test_what_is_typed_is_what_the_command_gets() -> None:
    got: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_options(GenerateOptions, seed=7)
    def ask(name: str, options: GenerateOptions = GenerateOptions(), loud: bool = False) -> None:
        got.append((name, options, loud))

    def typing(*words: str) -> Any:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return got.pop()

    assert typing("Ada") == ("Ada", GenerateOptions(seed=7), False)
    words = [
        "--top-k",
        "3",
        "--tree",
        "chain",
        "--draft",
        "off",
        "--stop",
        "a",
        "--stop",
        "b",
        "--raw",
        "--loud",
        "--temperature",
        "0.5",
    ]
    wanted = GenerateOptions(seed=7, top_k=3, tree="chain", draft="off", stop=["a", "b"], raw=True, temperature=0.5)
    assert typing("Bob", *words) == ("Bob", wanted, True)
    assert typing("Bob", "--tree", "tuned")[1].tree is None
    refused = CliRunner().invoke(app, ["Bob", "--tree", "bush"])
    assert refused.exit_code == 2 and "chain" in refused.output
