"""Sampling uses transformers' distribution, and each row has its own random numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, Processor, SamplingOptions
from headstart.decode.sampling import Prefixes, process, warp
from headstart.decode.verify import SamplingVerifier, row_generators
from headstart.errors import UserError
from headstart.model.model import Target, TargetOutput
from headstart.tree.tree import Tree, TreeBatch
from tests.decode.drafters import ReplayDrafter
from tests.tiny import tiny_model


@pytest.mark.parametrize("size", [40, 3000])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=0.7),
        SamplingOptions(temperature=1.0, top_k=5),
        SamplingOptions(temperature=1.0, top_p=0.9),
        SamplingOptions(temperature=3.0, top_p=0.99),  # more tokens than the short look of top-p holds
        SamplingOptions(temperature=0.8, min_p=0.05),
        SamplingOptions(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
    ],
)
def test_warping_equals_transformers(sampling: SamplingOptions, size: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, size)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    expected = warpers(torch.zeros(6, 1, dtype=torch.long), logits).softmax(-1)
    found = warp(sampling, logits)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # float32 sums in another order


def test_processing_equals_transformers() -> None:
    torch.manual_seed(0)
    logits, prefix = torch.randn(30), [3, 5, 5]
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prefix]), logits[None].clone())[0]
    assert torch.equal(process(SamplingOptions(repetition_penalty=1.4), logits, prefix), expected)


NEW_SETTINGS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "logit_bias": {3: 4.0, 7: -100.0},
}


def by_hand(options: SamplingOptions, logits_V: Tensor, prompt: list[int], generated: list[int]) -> Tensor:
    """vLLM's order: bias, repetition penalty (prompt included), then frequency and presence penalty of the answer."""
    scores_V = logits_V.float().clone()
    for token, bias in (options.logit_bias or {}).items():
        scores_V[int(token)] += bias
    for token in {*prompt, *generated}:
        scores_V[token] *= options.repetition_penalty if scores_V[token] < 0 else 1 / options.repetition_penalty
    for token, count in Counter(generated).items():
        scores_V[token] -= options.frequency_penalty * count
        scores_V[token] -= options.presence_penalty
    return scores_V


@pytest.mark.parametrize("settings", [{}, *({key: NEW_SETTINGS[key]} for key in NEW_SETTINGS), NEW_SETTINGS], ids=str)
@pytest.mark.parametrize("penalty", [1.0, 0.8, 1.4])
@pytest.mark.parametrize("processes", [True, False])
def test_growing_prefixes_are_processed_in_order(penalty: float, settings: dict[str, Any], processes: bool) -> None:
    """Several nodes of a row after each other, rows that leave, and tokens that were seen before or not."""
    generator = torch.Generator().manual_seed(0)
    processors = (NoRepeatNGramLogitsProcessor(2), MinLengthLogitsProcessor(9, 4)) if processes else ()
    options = SamplingOptions(repetition_penalty=penalty, processors=processors, **settings)
    prompts = [torch.randint(12, (size,), generator=generator).tolist() for size in (3, 1, 7)]
    texts = [list[int]() for _ in prompts]
    prefixes = Prefixes(options, prompts)
    for number in range(40):
        row_M = torch.arange(2 * len(texts)) // 2
        path_MP = torch.randint(12, (len(row_M), number % 4), generator=generator)
        if not processes:  # a node's path may have gaps
            path_MP[torch.rand(path_MP.shape, generator=generator) < 0.3] = -1
        logits_MV = torch.randn(len(row_M), 12, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)
        found_MV = prefixes.process(logits_MV, row_M, path_MP)
        for found_V, logits_V, row, path in zip(found_MV, logits_MV, row_M.tolist(), path_MP.tolist(), strict=True):
            generated = texts[row] + [token for token in path if token >= 0]
            expected_V = by_hand(options, logits_V, prompts[row], generated)
            expected_1V = LogitsProcessorList(processors)(torch.tensor([prompts[row] + generated]), expected_V[None])
            torch.testing.assert_close(found_V, expected_1V[0], rtol=1e-6, atol=1e-6)  # division by a product's inverse
        added = [torch.randint(12, ((number + row) % 3,), generator=generator).tolist() for row in range(len(texts))]
        longest = max(map(len, added))
        padded = [new + [-1] * (longest - len(new)) for new in added]
        prefixes.extend(torch.tensor(padded, dtype=torch.long), list(map(len, added)))
        texts = [text + new for text, new in zip(texts, added, strict=True)]
        if kept := {0: [2, 1, 0], 20: [0, 2]}.get(number):
            prefixes.reorder(kept)
            prompts, texts = [prompts[row] for row in kept], [texts[row] for row in kept]


def test_rows_that_resume_keep_their_counts() -> None:
    """Half of a batch that did not fit into memory goes on from its tokens so far: these count, the prompt does not."""
    options = DecodeOptions(temperature=1.0, presence_penalty=2.0, frequency_penalty=1.5)
    verifier = SamplingVerifier(options, [[1], [5, 5, 2]], [0, 1], samples_drafts=False)
    verifier.reorder([1])
    verifier.resume([[2, 7, 7]])
    logits_V = torch.randn(11, generator=torch.Generator().manual_seed(0))
    assert verifier._prefixes is not None
    found_1V = verifier._prefixes.process(logits_V[None], torch.tensor([0]), torch.empty(1, 0, dtype=torch.long))
    torch.testing.assert_close(found_1V[0], by_hand(options, logits_V, [], [2, 7, 7]))


class Written(TorchDispatchMode):
    """Counts the numbers that operations write, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and out.data_ptr() not in {
            one.data_ptr() for one in args if isinstance(one, torch.Tensor)
        }:  # fmt: skip
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize("processors", [(), (lambda ids, scores: scores + ids[0, -1],)])
def test_work_per_node_is_independent_of_the_text(processors: tuple[Processor, ...]) -> None:
    """Prompts of 100 and of 2000 tokens: the same numbers are written in each round after the first."""
    options = SamplingOptions(temperature=1.0, repetition_penalty=1.3, processors=processors, **NEW_SETTINGS)
    written = []
    for length in (100, 2000):
        verifier = SamplingVerifier(
            options, [[number % 11 for number in range(length)]] * 2, [0, 1], samples_drafts=True
        )
        verifier.first(torch.zeros(2, 11))
        batch = TreeBatch.of([Tree([1, 2, 3, 4], [-1, 0, 0, 1])] * 2)
        verifier.accept(batch, TargetOutput(torch.zeros(2, 4, 11)))  # makes room
        with Written() as counted:
            for _ in range(3):
                verifier.accept(batch, TargetOutput(torch.zeros(2, 4, 11)))
        written.append(counted.numbers)
    assert written[0] == written[1] > 0


def test_greedy_warping_is_certain() -> None:
    probs = warp(SamplingOptions(), torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_streams_of_a_row_are_independent() -> None:
    numbers = {torch.rand(3, generator=stream) for stream in row_generators(5)}
    assert len({tuple(one.tolist()) for one in numbers}) == 3


def test_seeded_and_independent_of_the_batch(target: Target) -> None:
    options = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=3, ignore_end=True)
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    once = [row.tokens for row in DecodeLoop(target).generate(texts, options)]
    again = [row.tokens for row in DecodeLoop(target).generate(texts, options)]
    assert once == again
    assert DecodeLoop(target).generate(texts[:1], options)[0].tokens == once[0]
    second = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=4, ignore_end=True)
    assert DecodeLoop(target).generate(texts[1:], second)[0].tokens == once[1]
    drafted = DecodeLoop(target, ReplayDrafter(once, 61, 0.5)).generate(texts, options)
    assert all(len(row.tokens) == 20 for row in drafted)


def test_each_row_reports_the_seed_that_repeats_it() -> None:
    loop, texts = DecodeLoop(Target(tiny_model("llama", vocab_size=61))), [[1, 2, 3], [4, 5, 6, 7]]
    options = DecodeOptions(max_new_tokens=20, temperature=1.0, ignore_end=True)
    rows = loop.generate(texts, options)
    for text, row in zip(texts, rows, strict=True):
        assert row.seed is not None
        assert loop.generate([text], replace(options, seed=row.seed))[0].tokens == row.tokens
    assert rows[0].seed != loop.generate(texts, options)[0].seed, "drawn for each call"
    assert loop.generate(texts, DecodeOptions(4))[0].seed is None, "greedy"


def test_path_dependent_processors_see_each_nodes_own_prefix(target: Target) -> None:
    """Greedy with a repetition penalty and a processor: drafts change nothing, whatever they are."""

    def no_repeat(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))

    options = DecodeOptions(24, repetition_penalty=1.3, processors=(no_repeat,), ignore_end=True)
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    plain = [row.tokens for row in DecodeLoop(target).generate(texts, options)]
    for right in (1.0, 0.6):
        drafted = DecodeLoop(target, ReplayDrafter(plain, 61, right)).generate(texts, options)
        assert [row.tokens for row in drafted] == plain
    assert sum(len(row.rounds) for row in drafted) < 2 * 23, "some drafts were accepted"
    stock = DecodeLoop(target).generate(texts, DecodeOptions(max_new_tokens=24, ignore_end=True))
    assert [row.tokens for row in stock] != plain, "the processors matter here"


class Counting:
    """A processor that keeps a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DecodeOptions(stop=("x",)), "need a tokenizer"),
        (DecodeOptions(temperature=1e-7), "temperature is 1e-07. Use 0 for greedy decoding, or at least 1e-06"),
        (DecodeOptions(presence_penalty=2.1), "presence_penalty is 2.1. Use a value from -2 to 2"),
        (DecodeOptions(frequency_penalty=float("nan")), "frequency_penalty is nan"),
        (DecodeOptions(logit_bias={3: 101.0}), "logit_bias has 3: 101.0. Map token ids to numbers from -100 to 100"),
        (DecodeOptions(logit_bias={"three": 1.0}), "logit_bias has 'three': 1.0"),
        (DecodeOptions(logit_bias={3: True}), "logit_bias has 3: True"),
        (DecodeOptions(logit_bias={"61": 1.0}), "logit_bias has 61, and the target's token ids end at 60"),
        (DecodeOptions(logit_bias=cast(Any, [3])), r"logit_bias is \[3\]. Give numbers by token id"),
        (DecodeOptions(logit_bias={61: 1.0}), "logit_bias has 61, and the target's token ids end at 60"),
        (DecodeOptions(logprobs=-1), "logprobs is -1"),
        (DecodeOptions(logprobs=cast(Any, True)), "logprobs is True. Give a whole number"),
        (DecodeOptions(seed=1 << 63), "seed is 9223372036854775808"),
        (DecodeOptions(seed=-(1 << 63) - 1), "seed is -9223372036854775809"),
        (DecodeOptions(processors=(Counting(),)), "Counting keeps a state"),
        (DecodeOptions(processors=(cast(Processor, lambda ids: ids),)), "cannot be applied to a token tree"),
    ],
)
def test_bad_options_are_refused(options: DecodeOptions, message: str, target: Target) -> None:
    """See `test_bad_prompts_and_options` in test_api.py, too."""
    with pytest.raises(UserError, match=message):
        DecodeLoop(target).generate([[1, 2]], options)


def test_every_row_has_a_seed_of_64_bits(target: Target) -> None:
    last = DecodeOptions(max_new_tokens=1, temperature=1.0, seed=(1 << 63) - 1)
    assert len(DecodeLoop(target).generate([[1, 2]], last)) == 1
    with pytest.raises(UserError, match="seed is 9223372036854775807"):
        DecodeLoop(target).generate([[1, 2], [3]], last)
