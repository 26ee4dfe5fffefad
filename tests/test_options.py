"""Decoding options are defined once, and every interface takes the same ones."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from headstart.cli import heads as cli_heads
from headstart.cli.options import with_options
from headstart.decode.loop import check_options
from headstart.decode.options import (
    DecodeKeywords,
    DecodeOptions,
    EngineOptions,
    SamplingOptions,
    meaning,
    token_biases,
)
from headstart.decode.verify import SAMPLES_DRAFTS
from headstart.drafters.catalog import DRAFTERS
from headstart.errors import UserError
from headstart.eval.options import AuditedEngine, AuditOptions, EvalOptions
from headstart.hf_generate.call import CustomGenerate
from headstart.hf_generate.request import _WARPERS
from headstart.hub.options import LoadKeywords, LoadOptions
from headstart.recipes.sections import EvalSection


def test_keyword_arguments_are_the_options() -> None:
    hints = get_type_hints(DecodeOptions)
    of_the_class_alone = {"ignore_end", "stop_test"}
    given = {item.name: hints[item.name] for item in fields(DecodeOptions) if item.name not in of_the_class_alone}
    assert get_type_hints(DecodeKeywords) == given
    hints = get_type_hints(LoadOptions)
    assert get_type_hints(LoadKeywords) == {item.name: hints[item.name] for item in fields(LoadOptions)}


def test_measuring_takes_the_same_defaults_but_for_drafter_and_seed() -> None:
    defaults = {item.name: item.default for item in fields(EvalOptions)}
    for item in fields(DecodeOptions):
        assert defaults[item.name] == {"drafter": "heads", "seed": 0}.get(item.name, item.default) != MISSING


def test_recipes_describe_options_in_the_same_words() -> None:
    for name in ("max_new_tokens", "temperature"):
        assert EvalSection.model_fields[name].description == meaning(DecodeOptions, name).text
        assert EvalSection.model_fields[name].default == getattr(DecodeOptions, name)


def test_every_option_has_a_meaning_and_the_class_shows_it() -> None:
    for one in fields(DecodeOptions):
        text = meaning(DecodeOptions, one.name).text
        assert text and f"{one.name}: {text}" in (DecodeOptions.__doc__ or "")


def test_descriptions_list_every_choice() -> None:
    assert all(name in meaning(DecodeOptions, "verifier").text for name in SAMPLES_DRAFTS)
    assert all(name in meaning(DecodeOptions, "drafter").text for name in DRAFTERS)


def test_options_are_checked_without_a_target() -> None:
    for options in (DecodeOptions(), EvalOptions(), DecodeOptions(top_k=np.int64(3), temperature=np.float32(0.5))):
        check_options(options)
    wrong: dict[str, Any] = {"top_p": 2.0, "verifier": "topk", "draft": "maybe", "stop": ["a", ""], "seed": 1 << 63}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name):
            check_options(DecodeOptions(**{name: value}))
    with pytest.raises(UserError, match="seed"):
        check_options(DecodeOptions(seed=(1 << 63) - 1), rows=2)


def test_numpy_numbers_become_pythons() -> None:
    numbers: dict[str, Any] = {
        "temperature": np.float64(0.5),
        "presence_penalty": np.float32(0.25),
        "seed": np.int64(3),
        "stop_token_ids": [np.int32(5)],
        "sweep_batch": (np.int8(2),),
        "logit_bias": {np.int64(4): np.float32(-1.5)},
        "chat_template_kwargs": {"depths": [np.int64(1)]},
    }
    options = EvalOptions(**numbers)
    check_options(options)
    written = json.loads(json.dumps(asdict(options)))
    assert [written[name] for name in numbers] == [0.5, 0.25, 3, [5], [2], {"4": -1.5}, {"depths": [1]}]


def test_every_option_is_checked_for_its_type() -> None:
    for item in fields(DecodeOptions):
        if item.name not in ("draft", "tree", "stop_test"):  # choices, and a Python-only option
            with pytest.raises(UserError, match=f"{item.name} is "):
                check_options(DecodeOptions(**{item.name: 1j}))


def test_transformers_callers_give_options_by_the_same_names() -> None:
    taken = inspect.signature(CustomGenerate.__call__).parameters
    own = ("drafter", "tree", "draft", "deterministic", "verifier")
    for name in (*own, "presence_penalty", "frequency_penalty", "logit_bias"):
        assert taken[name].default == getattr(DecodeOptions, name)
    assert {name for _, name in _WARPERS} < {one.name for one in fields(SamplingOptions)}


def test_commands_take_every_option_that_can_be_typed() -> None:
    typed = {item.name for item in fields(DecodeOptions) if item.metadata["meaning"].on_cli}
    assert typed <= inspect.signature(cli_heads.generate).parameters.keys()
    for command, without in (
        (cli_heads.chat, {"stop", "logprobs"}),
        (cli_heads.race, {"logprobs"}),
        (cli_heads.evaluate, {"stop", "raw", "logprobs"}),
    ):
        assert typed & inspect.signature(command).parameters.keys() == typed - without
    assert "processors" not in inspect.signature(cli_heads.generate).parameters
    assert inspect.signature(cli_heads.chat).parameters["max_new_tokens"].default == 512


def test_typed_options_reach_the_command() -> None:
    got: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_options(seed=7)
    def ask(name: str, options: DecodeOptions = DecodeOptions(), loud: bool = False) -> None:
        got.append((name, options, loud))

    def typing(*words: str) -> Any:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return got.pop()

    assert typing("Ada") == ("Ada", DecodeOptions(seed=7), False)
    words = "--top-k 3 --tree chain --draft off --stop a --stop b --raw --loud --temperature 0.5"
    wanted = DecodeOptions(seed=7, top_k=3, tree="chain", draft="off", stop=["a", "b"], raw=True, temperature=0.5)
    assert typing("Bob", *words.split()) == ("Bob", wanted, True)
    assert typing("Bob", "--tree", "tuned")[1].tree is None
    assert typing("Bob", "--logit-bias", '{"42": -1.5}', "--logprobs", "0")[1] == DecodeOptions(
        seed=7, logit_bias={42: -1.5}, logprobs=0
    )
    for wrong in ("[42]", '{"a": 1}', '{"42": "b"}', '{"42": null}', "42"):
        with pytest.raises(UserError, match=r"JSON object|does not map token ids to numbers"):
            token_biases(wrong)
    refused = CliRunner().invoke(app, ["Bob", "--tree", "bush"])
    assert refused.exit_code == 2 and "chain" in refused.output


@pytest.mark.parametrize(
    ("options", "typed", "values"),
    [
        (EvalOptions, "--sweep-batch 1,4 --sweep-batch 16", {"sweep_batch": (1, 4, 16)}),
        (EvalOptions, "--compare ngram,chain --compare static", {"compare": ("ngram", "chain", "static")}),
        (AuditOptions, "--temperature 0.5,1", {"temperature": (0.5, 1.0)}),
        (AuditOptions, "--drafters ngram --verifier top_k", {"drafters": ("ngram",), "verifier": ("top_k",)}),
        (DecodeOptions, "--stop a,b", {"stop": ["a,b"]}),
        (DecodeOptions, "--stop-token-ids 5,6 --stop-token-ids 7", {"stop_token_ids": (5, 6, 7)}),
        (AuditedEngine, "", {"engine_requests": (1, 4, 8)}),
        (EngineOptions, "--engine-requests 2 --engine-drafts 3,1", {"engine_requests": (2,), "engine_drafts": (3, 1)}),
        (EvalOptions, "--sweep-batch 4,0", "--sweep-batch is '4,0', not N,N... from 1."),
        (EvalOptions, "--sweep-batch 4;8", "--sweep-batch is '4;8', not N,N... from 1."),
        (EvalOptions, "--compare ,", "--compare is ',', not NAME,NAME...."),
        (DecodeOptions, "--stop-token-ids a", "--stop-token-ids is 'a', not ID,ID...."),
        (AuditOptions, "--temperature nan", "--temperature is 'nan', not T,T...."),
        (EngineOptions, "--engine-drafts 17", "--engine-drafts is '17', not N,N... from 1 to 16."),
    ],
)
def test_several_values_are_separated_by_commas(options: Any, typed: str, values: Any) -> None:
    got: list[Any] = []

    def measure(options: Any = None) -> None:
        got.append(options)

    measure.__annotations__["options"] = options
    app = typer.Typer()
    app.command()(with_options()(measure))
    result = CliRunner().invoke(app, typed.split())
    if isinstance(values, str):
        assert isinstance(result.exception, UserError) and result.exception.problem.startswith(values)
    else:
        assert got == [options(**values)], result.output
