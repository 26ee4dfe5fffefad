"""Heads inside transformers' own `generate`: the output is the same with and without them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import headstart
import headstart.hf_generate.call as lend
import headstart.kernels.prepacked as prepacked
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.errors import UserError
from headstart.eval.enumeration import OutputPenalties
from headstart.hf_generate.request import LogitsChain, Prompts
from headstart.hub.format import check_folder
from headstart.model.model import Target
from headstart.tree.tree import Committed, Request, Tree, TreeBatch
from tests.hub.helpers import export
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default")

PAD, END = 0, 2
LONG, SHORT = [9, 40, 12, 77, 31, 8], [50, 21, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> str:
    """Exported, untrained heads."""
    path = tmp_path_factory.mktemp("generation") / "heads"
    export(path, tiny_target)
    return str(path)


@pytest.fixture
def no_code_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect transformers' copies of repository code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def model() -> Any:
    """A plain transformers model, unknown to headstart."""
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_length=1024)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


def batch(*rows: list[int]) -> dict[str, Tensor]:
    """Rows padded on the left, as a tokenizer gives them."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


class Foresight:
    """Drafts the rest of known texts, with a wrong token beside each right one."""

    name, aux_layers, max_nodes = "foresight", (), 9

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def prefill(self, prompts: Sequence[Sequence[int]], states: Any) -> list[list[int]]:
        return [list(prompt) for prompt in prompts]

    def propose(self, session: list[list[int]], roots: TreeBatch, request: Request) -> list[Tree]:
        trees = []
        for row, last in zip(session, roots.root_tokens, strict=True):
            known = next((text for text in self.texts if text[: len(row) + 1] == [*row, last]), [])
            rest = [*known[len(row) + 1 :], 1, 1, 1, 1][:4]  # past its end, anything
            tokens = [last, *(token for right in rest for token in (right + 1, right))]
            trees.append(Tree(tokens, [-1, 0, 0, 2, 2, 4, 4, 6, 6]))
        return trees

    def commit(self, session: list[list[int]], committed: Committed) -> None:
        for row, tokens in zip(session, committed.tokens, strict=True):
            row.extend(tokens)

    def reorder(self, session: list[list[int]], rows: Sequence[int]) -> None:
        session[:] = [session[row] for row in rows]

    def join(self, session: list[list[int]], other: list[list[int]]) -> list[list[int]]:
        return session + other


def same(model: Any, folder: str, inputs: dict[str, Tensor], tokenizer: Any = None, **options: Any) -> Tensor:
    """Return the output of transformers' own loop; assert that heads and all-correct drafts give the same.

    All-correct drafts make texts end in the middle of an accepted path.
    """
    stops = options.get("stopping_criteria", ())
    plain = model.generate(**inputs, tokenizer=tokenizer, **options)
    seen = [criterion.calls for criterion in stops]
    heads = headstart.custom_generate(folder, tokenizer=tokenizer)
    assert torch.equal(model.generate(**inputs, custom_generate=heads, **options), plain)
    texts = [row[mask == 1] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    length = inputs["input_ids"].shape[1]
    known = [[*text.tolist(), *row[length:].tolist()] for text, row in zip(texts, plain, strict=True)]
    ((_, _, decoder),) = lend._PREPARED[model].decoders.values()
    loop = decoder.loop()
    drafters, loop.drafters = loop.drafters, (Foresight(known),)
    before = [criterion.calls for criterion in stops]
    output = model.generate(**inputs, custom_generate=heads, draft="on", return_dict_in_generate=True, **options)
    loop.drafters = drafters
    assert torch.equal(output.sequences, plain)
    if plain.shape[1] > length + 2:
        assert output.tokens_per_round.max() > 2
    if len(texts) == 1:  # once per emitted token
        assert [criterion.calls for criterion in stops] == [old + new for old, new in zip(before, seen, strict=True)]
    return plain


class Ban(LogitsProcessor):
    """Bans tokens congruent to the text's length modulo 7: depends on the path and on padding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids.shape[1] % 7 :: 7] = float("-inf")
        return scores


class StopAt(StoppingCriteria):
    """Stop after a token; counts its calls."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.isin(input_ids[:, -1], self.tokens)


class Log(BaseStreamer):
    """Records a streamer's calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 24},
    "max_length": {"max_length": 17},
    "default length": {},
    "one token": {"max_new_tokens": 1},
    "no time": {"max_new_tokens": 9, "max_time": 1e-9},
    "repetition penalty": {"max_new_tokens": 24, "repetition_penalty": 1.7},
    "n-grams, bias": {"max_new_tokens": 24, "no_repeat_ngram_size": 2, "sequence_bias": [[[5], 3.0], [[9, 8], -4.0]]},
    "min_new_tokens, suppressed": {"max_new_tokens": 16, "min_new_tokens": 12, "suppress_tokens": [3, 4, 5]},
    "forced end": {"max_new_tokens": 9, "forced_eos_token_id": 6},
    "penalty after others": {"max_new_tokens": 16, "repetition_penalty": 1.7, "sequence_bias": [[[5], 3.0]]},
}


@pytest.mark.parametrize("rows", [(LONG,), (LONG, SHORT, [7])], ids=["one", "batch"])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_equals_transformers(model: Any, folder: str, rows: Any, options: dict[str, Any]) -> None:
    plain = same(model, folder, batch(*rows), **options)
    assert plain.dtype == torch.int64
    same(model, folder, batch(*rows), eos_token_id=[END, *plain[:, -1].tolist()], **options)  # ends that come up


def test_rows_that_end_early_are_padded(model: Any, folder: str) -> None:
    inputs = batch(LONG, SHORT)
    end = int(model.generate(**inputs, max_new_tokens=30)[1, 15])  # an early token of the second row
    expected = same(model, folder, inputs, max_new_tokens=30, eos_token_id=end, pad_token_id=7)
    assert (expected == 7).any()
    off = model.generate(
        **inputs, max_new_tokens=30, eos_token_id=end, draft="off", custom_generate=headstart.custom_generate(folder)
    )
    assert torch.equal(off == PAD, (expected == 7) | (expected == PAD))


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "qwen3"])
def test_other_architectures(tmp_path: Path, kind: str) -> None:
    export(tmp_path / "heads", Target(tiny_model(kind), None, kind))
    fresh = tiny_model(kind)
    fresh.generation_config.eos_token_id = None
    same(fresh, str(tmp_path / "heads"), batch(LONG, SHORT), max_new_tokens=16, pad_token_id=PAD)


@pytest.mark.parametrize("rows", [(LONG,), (LONG, SHORT, [7])], ids=["one", "batch"])
def test_custom_processors(model: Any, folder: str, rows: Any) -> None:
    for processors in (
        [Ban()],
        [RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=6)],
        [Ban(), RepetitionPenaltyLogitsProcessor(1.5)],
    ):
        same(model, folder, batch(*rows), max_new_tokens=20, repetition_penalty=1.2, logits_processor=processors)


def test_penalties_that_transformers_lacks(model: Any, folder: str) -> None:
    inputs = batch(LONG, SHORT)
    penalties = OutputPenalties(SamplingOptions(presence_penalty=1.5, frequency_penalty=0.4), len(LONG))
    options: dict[str, Any] = {"max_new_tokens": 20, "repetition_penalty": 1.2}
    expected = model.generate(**inputs, **options, sequence_bias=[[[5], 1.0]], logits_processor=[penalties])
    ours = {"presence_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {5: 1.0}, "draft": "on"}
    heads = headstart.custom_generate(folder)
    assert torch.equal(model.generate(**inputs, **options, **ours, custom_generate=heads), expected)
    assert not torch.equal(model.generate(**inputs, **options, custom_generate=heads), expected)


def test_nothing_is_applied_twice() -> None:
    """Each processor that transformers builds becomes a setting of the decode loop or stays in the list."""
    model = tiny_model("llama")
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.3, renormalize_logits=True
    )
    prompts = Prompts([[1, 2], [3]], [0, 1])

    def chain(**changes: Any) -> LogitsChain:
        now = GenerationConfig(**{**config.to_diff_dict(), **changes})
        processors = model._get_logits_processor(now, input_ids_seq_length=2, logits_processor=[Ban()], device="cpu")
        return LogitsChain.read(processors, True, prompts)

    full = chain()
    assert full.settings == {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3
    }  # fmt: skip
    assert [type(processor).__name__ for processor in full.rest] == ["Ban"]
    later = chain(typical_p=0.8)  # runs last, so the processors before it stay in the list
    assert later.settings == {"temperature": 1.0, "repetition_penalty": 1.3}
    assert len(later.rest) == 6


@pytest.mark.parametrize("rows", [(LONG,), (LONG, SHORT)], ids=["one", "batch"])
def test_stopping_criteria(model: Any, folder: str, rows: Any) -> None:
    text = model.generate(**batch(*rows), max_new_tokens=30)
    stop = StopAt(int(text[0, 18]), int(text[-1, 26]))
    # With an end token: without one, transformers continues finished rows until all have ended.
    same(model, folder, batch(*rows), max_new_tokens=30, eos_token_id=END, stopping_criteria=[stop])
    assert stop.calls > 5


def test_stop_strings(model: Any, folder: str) -> None:
    tokenizer = tiny_tokenizer()
    inputs = batch(LONG)
    odd = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).isprintable()]
    odd += [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).isascii()]  # halves of characters
    options = {"max_new_tokens": 40, "suppress_tokens": odd}
    text = model.generate(**inputs, **options)[0].tolist()
    for indices in ((10, 12), (20, 21), (4, 8)):  # the last begins inside the prompt
        stop = tokenizer.decode(text[indices[0] : indices[1]])
        plain = same(model, folder, inputs, tokenizer, stop_strings=[stop, "@@@"], **options)
        assert plain.shape[1] < len(text)
    with pytest.raises(UserError, match=r"stop_strings need a tokenizer.*tokenizer=tokenizer"):
        model.generate(**inputs, stop_strings="x", custom_generate=headstart.custom_generate(folder))


@pytest.mark.parametrize("rows", [(LONG,), (LONG, SHORT)], ids=["one", "batch"])
def test_the_streamer_is_told_the_same(model: Any, folder: str, rows: Any) -> None:
    end = int(model.generate(**batch(*rows), max_new_tokens=20)[-1, 11])
    for options in ({"max_new_tokens": 20}, {"max_new_tokens": 20, "eos_token_id": end}):
        plain, ours = Log(), Log()
        model.generate(**batch(*rows), streamer=plain, **options)
        model.generate(**batch(*rows), streamer=ours, custom_generate=headstart.custom_generate(folder), **options)
        assert ours.calls == plain.calls
        assert ours.calls[-1] == "end"


def test_text_arrives_in_another_thread(model: Any, folder: str) -> None:
    tokenizer = tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    options = {**batch(LONG), "max_new_tokens": 20, "streamer": streamer}
    heads = headstart.custom_generate(folder)
    thread = threading.Thread(target=model.generate, kwargs={**options, "custom_generate": heads})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(**batch(LONG), max_new_tokens=20)[0, len(LONG) :])


def test_return_dict(model: Any, folder: str) -> None:
    options = {**batch(LONG, SHORT), "max_new_tokens": 12}
    ours = model.generate(**options, return_dict_in_generate=True, custom_generate=headstart.custom_generate(folder))
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(model.generate(**options), ours.sequences)
    assert ours.tokens_per_round.shape == (2,)
    assert (ours.scores, ours.logits, ours.past_key_values) == (None, None, None)


def test_sampling_is_reproducible_and_of_the_right_support(model: Any, folder: str) -> None:
    heads = headstart.custom_generate(folder)
    options = {**batch(LONG), "do_sample": True, "top_k": 4, "temperature": 3.0, "num_return_sequences": 200}
    torch.manual_seed(5)
    first = model.generate(**options, max_new_tokens=6, custom_generate=heads)
    torch.manual_seed(5)
    again = model.generate(**options, max_new_tokens=6, custom_generate=heads)
    later = model.generate(**options, max_new_tokens=6, custom_generate=heads)
    assert first.shape == (200, len(LONG) + 6)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    logits = model(first).logits[:, len(LONG) - 1 : -1]
    allowed = logits.topk(4).indices
    assert (allowed == first[:, len(LONG) :, None]).any(-1).all()
    torch.manual_seed(6)
    theirs = model.generate(**options, max_new_tokens=2)
    counts = [Counter(tokens[:, len(LONG)].tolist()) for tokens in (theirs, first)]
    assert set(counts[0]) == set(counts[1])
    assert all(abs(counts[0][token] - counts[1][token]) < 50 for token in counts[0])  # 5 deviations


def test_sampling_through_a_processor(model: Any, folder: str) -> None:
    options = {**batch(LONG, SHORT), "do_sample": True, "typical_p": 0.5, "logits_processor": [Ban()]}
    torch.manual_seed(1)
    out = model.generate(**options, max_new_tokens=12, custom_generate=headstart.custom_generate(folder))
    assert all(int(token) % 7 != index % 7 for row in out for index, token in enumerate(row) if index >= len(LONG))


def state(model: Any) -> dict[str, Any]:
    """Return everything about a model that wrapping it could change."""
    return {
        "attention": model.config._attn_implementation,
        "config": model.config.to_json_string(),
        "generation config": model.generation_config.to_json_string(),
        "training": [module.training for module in model.modules()],
        "learning": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "names": sorted(vars(model)),
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    weights = all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
    return weights and all(a[key] == b[key] for key in a if key != "weights")


def test_the_model_is_left_as_it_was(folder: str) -> None:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_length=1024).train()
    model.model.layers[1].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = state(model)
    heads = headstart.custom_generate(folder)
    ids = batch(LONG)["input_ids"]
    for _ in range(2):
        model.generate(ids, max_new_tokens=4, custom_generate=heads)
        assert equal(state(model), before)
    loss = model(ids, labels=ids).loss  # still trains
    loss.backward()
    assert model.lm_head.weight.grad is not None

    class Fails(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.generate(ids, max_new_tokens=4, custom_generate=heads, stopping_criteria=[Fails()])
    assert equal(state(model), before)
    other = tiny_model("llama", seed=1, vocab_size=len(tiny_tokenizer()))
    before = state(other)
    with pytest.raises(UserError, match="is another model"):
        other.generate(ids, custom_generate=heads)
    assert equal(state(other), before)


def test_heads_load_once_and_models_go(tmp_path: Path, tiny_target: Target, spy: Any) -> None:
    export(tmp_path / "heads", tiny_target)
    loads = spy(lend, "load")
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    for _ in range(2):
        model.generate(torch.tensor([SHORT]), custom_generate=headstart.custom_generate(tmp_path / "heads"))
    assert len(loads) == 1
    export(tmp_path / "heads", tiny_target)
    model.generate(torch.tensor([SHORT]), custom_generate=headstart.custom_generate(tmp_path / "heads"))
    assert len(loads) == 2
    alive = weakref.ref(model)
    del model
    loads.clear()
    gc.collect()
    assert alive() is None


def test_a_model_whose_forwards_are_graphs_is_not_kept(folder: str, device: StandIn) -> None:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_length=1024).to(CUDA)
    with lend.decoder_for(model, folder) as decoder:
        assert decoder.target.forwards == "CUDA graphs"
        assert len(decoder.loop("none").generate([SHORT], DecodeOptions(4, ignore_end=True))[0].tokens) == 4
    alive = weakref.ref(model)
    del model, decoder
    gc.collect()
    assert alive() is None


def test_weights_pack_once_per_change(tmp_path: Path, tiny_target: Target, spy: Any) -> None:
    packed = spy(prepacked, "prepack")
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    model.generation_config.eos_token_id = None
    for name in ("heads", "others"):
        export(tmp_path / name, tiny_target)

    def generate(name: str) -> None:
        heads, asked = headstart.custom_generate(tmp_path / name), {**batch(SHORT), "max_new_tokens": 6}
        assert torch.equal(model.generate(**asked, custom_generate=heads), model.generate(**asked))

    generate("heads")
    first = len(packed)
    for name in ("heads", "others", "heads"):
        generate(name)
        assert len(packed) == first
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    generate("heads")
    assert len(packed) == first + min(first, 1)
    model.lm_head.weight.data.mul_(-1)  # which PyTorch does not count
    generate("heads")
    assert len(packed) == first + 2 * min(first, 1)


@pytest.mark.usefixtures("no_code_is_left")
def test_a_folder_of_heads(model: Any, folder: str) -> None:
    tokenizer = tiny_tokenizer()
    check_folder(Path(folder))
    heads = {"custom_generate": folder, "trust_remote_code": True}
    inputs = batch(LONG, SHORT)
    plain = model.generate(**inputs, max_new_tokens=20)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, **heads), plain)
    end = int(plain[0, 15])
    config = GenerationConfig(max_new_tokens=20, eos_token_id=end, pad_token_id=PAD, stop_strings=["q", "z"])
    theirs, ours = Log(), Log()
    expected = model.generate(**inputs, generation_config=config, tokenizer=tokenizer, streamer=theirs)
    got = model.generate(**inputs, generation_config=config, tokenizer=tokenizer, streamer=ours, draft="on", **heads)
    assert torch.equal(got, expected)
    assert ours.calls == theirs.calls
    assert config.stop_strings == ["q", "z"]
    criteria = [StopAt(int(plain[0, 12]))]
    assert model.generate(inputs["input_ids"][:1], stopping_criteria=criteria, **heads).shape[1] <= 13


def test_a_folder_needs_trust_and_a_running_generate(model: Any, folder: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(torch.tensor([LONG]), custom_generate=folder, trust_remote_code=False)
    with pytest.raises(UserError, match=r"outside a call of model\.generate"):
        headstart.hf_generate.call.generate(model, torch.tensor([LONG]))


def test_a_folder_without_custom_generate_code_is_still_valid(tmp_path: Path, tiny_target: Target, model: Any) -> None:
    export(tmp_path / "heads", tiny_target)
    for file in (tmp_path / "heads" / "custom_generate").iterdir():
        file.unlink()
    (tmp_path / "heads" / "custom_generate").rmdir()
    check_folder(tmp_path / "heads")
    heads = headstart.custom_generate(tmp_path / "heads")
    assert model.generate(torch.tensor([LONG]), max_new_tokens=5, custom_generate=heads).shape == (1, len(LONG) + 5)


def test_the_folder_of_a_run(tmp_path: Path, tiny_target: Target, model: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\nheads: {}\n")
    export(tmp_path / "heads", tiny_target)
    expected = model.generate(torch.tensor([LONG]), max_new_tokens=5)
    heads = headstart.custom_generate(tmp_path)
    assert torch.equal(model.generate(torch.tensor([LONG]), max_new_tokens=5, custom_generate=heads), expected)


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is not available"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits is not available"),
    "guidance": ({"guidance_scale": 2.0}, "keeps a state"),
    "sharded": ({"synced_gpus": True}, "sharded"),
    "positions": ({"position_ids": torch.tensor([[1, 2, 3, 4, 5, 6]])}, "position_ids"),
    "verifier": ({"verifier": "greedy_drafts"}, "Unknown verifier"),
    "draft": ({"draft": "sometimes"}, "draft is 'sometimes'"),
    "tree": ({"tree": "oak"}, "Unknown tree 'oak'"),
    "too long": ({"max_new_tokens": 5000}, "context of 1024"),
}


@pytest.mark.parametrize("case", FOREIGN.values(), ids=FOREIGN.keys())
def test_refused(model: Any, folder: str, case: tuple[dict[str, Any], str]) -> None:
    options, message = case
    with pytest.raises(UserError, match=message) as caught:
        model.generate(**batch(LONG), **options, custom_generate=headstart.custom_generate(folder))
    assert caught.value.remedy


def test_refused_inputs(model: Any, folder: str) -> None:
    heads = headstart.custom_generate(folder)
    ids = torch.tensor([LONG])
    with pytest.raises(UserError, match="assisted generation"):
        model.generate(ids, assistant_model=model, custom_generate=heads)
    with pytest.raises(UserError, match="padding_side='left'"):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]), custom_generate=heads)
    cache = DynamicCache()
    model(ids[:, :3], past_key_values=cache)
    with pytest.raises(UserError, match="past_key_values"):
        model.generate(ids, past_key_values=cache, custom_generate=heads)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(UserError, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds, custom_generate=heads)
    with pytest.raises(UserError, match="index in the batch"):
        model.generate(**batch(LONG, SHORT), prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 7], custom_generate=heads)
    one = model.generate(ids, prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 7], custom_generate=heads)
    assert set(one[0, len(LONG) :].tolist()) <= {5, 6, 7}
    with pytest.raises(UserError, match="no pad token"):
        fresh = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_length=1024)
        fresh.generation_config.eos_token_id = None
        fresh.generate(torch.tensor([LONG, LONG]), stopping_criteria=[StopAt(3)], custom_generate=heads)
