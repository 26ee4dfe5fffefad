"""Sections of a recipe: type, default and meaning of every setting.

Fingerprints and identities of artifacts follow from the role of each field (`headstart.heads.settings.Role`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from headstart.errors import UserError
from headstart.heads.settings import DependsOn, Role, Section
from headstart.servers.names import ENGINES, STATES_ENGINES, FormatName, option_values, split_words

PositionWeight = Literal["exponential", "subsampled", "dpace"]
"""`exponential` and `dpace` are in `headstart.train.losses`, `subsampled` in `headstart.train.batches`."""
LossName = Literal["soft_ce", "hard_ce", "tv_ce", "half_l1"]
"""Implemented in `headstart.train.losses`."""
_Beta = Annotated[float, Field(ge=0, lt=1)]
_FEWEST_TOKENS = 10  # with fewer, at most one sampled token would represent all others
_Width = Annotated[int, Field(ge=1, le=1024)]
_ADDRESS = re.compile(r"https?://[^\s/?#]+(:\d+)?(/[^\s?#]*)?")

_OF_TARGET, _OF_PROMPTS = DependsOn("target.spec"), DependsOn("data.prompts")


class TargetSection(Section):
    """The frozen model."""

    spec: str = Field(
        "smollm2-135m",
        description="Packaged name, hub id, folder, or .gguf file. A variant or override that changes it drops the "
        "earlier target's revision, adapter, trust_remote_code and data.chat_template_kwargs, and the settings of "
        "heads that default to the target's.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto is bfloat16 where the machine is fast at it."
    )
    device: str = Field(
        "auto",
        description="auto is CUDA when there is one; all spreads the target over all GPUs of the machine, where one "
        "process uses it.",
    )
    revision: Annotated[str | None, _OF_TARGET] = Field(None, description="Revision of a hub id.")
    adapter: Annotated[str | None, _OF_TARGET] = Field(
        None, description="Folder or hub id of a peft adapter (LoRA ...): the target is the model with it merged in."
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="Bits that the linear layers of the target are put into when it is loaded; needs torchao."
    )
    exact: Literal["auto", "bits", "tokens"] = Field(
        "auto",
        description="bits: greedy text in bfloat16 equals plain decoding's token for token (CPUs with compiled "
        "kernels); tokens, which auto takes: equal up to rounding at near-ties.",
    )
    trust_remote_code: Annotated[bool, _OF_TARGET] = Field(
        False, description="Run Python code from the target's folder or repository."
    )


class PromptSource(Section):
    """One of several sources of prompts."""

    source: str = Field(description="A .jsonl/.json file, a datasets name, 'ready-made' or 'self'.")
    weight: float = Field(1.0, gt=0, description="Its share of the prompts, relative to the other weights.")
    split: str | None = Field(None, description="Split of a dataset; data.split by default.")
    revision: str | None = Field(None, description="Branch, tag or commit of a dataset of the hub.")


class DataSection(Section):
    """Conversations that the target itself writes."""

    prompts: str | tuple[PromptSource, ...] = Field(
        "self",
        description="'self' (the target writes its own prompts), 'ready-made' (requests that come with headstart), "
        "a .jsonl/.json file, a datasets name, or a list of {source, weight}, each with a split and a revision of its "
        "own where it needs them. A variant or override that changes it drops the earlier data.split and "
        "data.revision.",
    )
    split: Annotated[str, _OF_PROMPTS] = Field("train", description="Split, when prompts is a datasets name.")
    revision: Annotated[str | None, _OF_PROMPTS] = Field(
        None, description="Branch, tag or commit, when prompts is a dataset of the hub."
    )
    exclude: tuple[str, ...] = Field(
        (),
        description="Question files: prompts that equal one of their questions, or share 50 consecutive words with "
        "one, are left out.",
    )
    seed_prompts: Literal["broad", "none"] = Field(
        "broad", description="Where self-prompts start: from seed prompts on many everyday subjects, or from nothing."
    )
    conversations: Annotated[int, Role.AMOUNT] = Field(1600, ge=1, description="Most training conversations.")
    heldout: Annotated[int, Role.AMOUNT] = Field(
        64, ge=0, description="Conversations kept out of training, for reports."
    )
    validation: Annotated[int, Role.AMOUNT] = Field(
        48, ge=1, description="Conversations kept out of training, for validation and tuning."
    )
    minutes: Annotated[float | None, Role.AMOUNT] = Field(
        None, gt=0, description="Stop writing training conversations after this long."
    )
    max_prompt_tokens: int = Field(
        384, ge=8, description="Longest prompt; longer prompts and later turns are left out."
    )
    prefix_tokens: int = Field(
        64, ge=1, description="For targets without a chat template: how many tokens of each plain text are the prompt."
    )
    chat_template_kwargs: Annotated[dict[str, Any], _OF_TARGET] = Field(
        default_factory=dict, description="Variables for the chat template, such as {enable_thinking: false}."
    )
    max_new_tokens: int = Field(160, ge=8, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Temperature of the answers; 0 is greedy.")
    sampled_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the training answers drawn at temperature 1 instead, from the 64 likeliest tokens.",
    )
    batch_size: Annotated[int, Role.RUNTIME] = Field(
        64, ge=1, le=100_000, description="Rows of a batch of conversations."
    )
    writing_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="How the target writes what is trained on, and computes its hidden states meanwhile: in its dtype "
        "(auto), or with products in 8 bits (int8) where a CPU computes faster with them.",
    )
    regenerate: bool = Field(True, description="Replace the answers of a given file by the target's own.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of prompts and answers.")
    states: Annotated[Literal["stored", "online"], Role.AMOUNT] = Field(
        "stored",
        description="stored: hidden states are computed before training and kept on disk; online: training computes "
        "them with the target, and nothing is kept.",
    )
    cache_gigabytes: Annotated[float, Role.AMOUNT] = Field(
        4.0, gt=0, description="Most gigabytes (1e9 bytes) of hidden states kept on disk."
    )
    states_dtype: Annotated[Literal["auto", "int8", "fp8"], Role.AMOUNT] = Field(
        "auto",
        description="How hidden states are stored: in the target's dtype (auto), or in one byte per number with a "
        "scale for each token.",
    )
    server: Annotated[tuple[str, ...] | None, Role.RUNTIME] = Field(
        None,
        description=f"Server that writes the conversations: an engine that the run starts and stops ({ENGINES}), or "
        "the address of a vLLM server or llama-server with this target, or several with commas between them; null "
        "writes them in this process; auto means vllm if its command is found and the target is not stored quantised, "
        "else null.",
    )
    states_server: Annotated[tuple[str, ...] | None, Role.RUNTIME] = Field(
        None,
        description="Server that computes the hidden states, stored (data.states=stored) or streamed to training "
        "(online): vllm, which the run starts and stops; or addresses of vLLM servers that extract them; null computes "
        "them in this process; auto means vllm if data.server is vllm and it extracts this target's states, else null.",
    )
    server_command: Annotated[str, Role.RUNTIME] = Field(
        "",
        description="Command that starts the engines, such as a path in another environment; empty for the default.",
    )
    server_arguments: Annotated[str, Role.RUNTIME] = Field(
        "", description="Further arguments for the engines, such as '--max-model-len 4096 --tensor-parallel-size 2'."
    )
    server_requests: Annotated[int | None, Role.RUNTIME] = Field(
        None,
        ge=1,
        description="Concurrent requests over all servers. null means 512 per vLLM address that writes, twice the "
        "slots of a llama-server, and 64 per address that computes states.",
    )

    @field_validator("server", "states_server", mode="before")
    @classmethod
    def _addresses(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return None
        engines = (*(ENGINES if info.field_name == "server" else STATES_ENGINES).split(", "), "auto")
        given = value.split(",") if isinstance(value, str) else value
        parts = list(given) if isinstance(given, list | tuple) else [given]
        addresses = [address for part in parts if (address := part.strip() if isinstance(part, str) else part) != ""]
        for address in addresses:
            is_engine = len(addresses) == 1 and address in engines
            if not is_engine and not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
                raise UserError(
                    f"Recipe key 'data.{info.field_name}' has {address!r}.",
                    f"Write {' or '.join(engines)}, an address such as http://localhost:8000, several with commas "
                    "between them, or null.",
                )
        return tuple(addresses) or None

    @property
    def engine(self) -> str | None:
        """Name of the engine that a run starts; None for running servers, or without any."""
        return self.server[0] if self.server and "://" not in self.server[0] else None

    @property
    def states_source(self) -> tuple[str, ...] | None:
        """Addresses of servers that compute hidden states; ("vllm",) if the run starts them; None without servers."""
        if self.states_server == ("auto",):
            return ("vllm",) if self.engine == "vllm" else None
        return self.states_server

    @model_validator(mode="after")
    def _options_of_an_engine(self) -> Self:
        given = next((name for name in ("server_command", "server_arguments") if getattr(self, name)), None)
        if given and self.engine is None and self.states_source != ("vllm",):
            raise UserError(f"data.{given} is for an engine that the run starts.", f"Set data.server: {ENGINES}.")
        if given and self.engine == "llama.cpp" and self.states_source == ("vllm",):
            raise UserError(
                f"data.{given}={getattr(self, given)!r} would apply to both llama.cpp and vllm.",
                "Leave it out, or set data.server or data.states_server to null or to an address.",
            )
        for name in ("server_command", "server_arguments"):
            split_words(getattr(self, name), f"data.{name}")
        return self

    @property
    def server_numerics(self) -> list[str]:
        """Arguments of the run's engine that change what it generates."""
        flags = ("--dtype", "--quantization", "-q", "--kv-cache-dtype", "--cache-type-k", "--cache-type-v")
        return [f"{flag} {value}" for flag, value in option_values(self.server_arguments) if flag in flags]

    @property
    def own_answers(self) -> bool:
        """Whether the target writes the answers; otherwise they come from the prompt files."""
        return self.regenerate or self.self_share == 1

    @property
    def in_int8(self) -> bool:
        """Whether training conversations are written with int8 matmuls where these are faster."""
        return self.writing_dtype == "int8" and not self.server

    @property
    def online(self) -> bool:
        """Whether hidden states are computed during training, not stored."""
        return self.states == "online"

    @property
    def forwards_in_training(self) -> bool:
        """Whether training processes load the target and compute hidden states themselves."""
        return self.online and not self.states_source

    @property
    def sources(self) -> tuple[PromptSource, ...]:
        """External sources of prompts, each with its split."""
        named = self.prompts
        if isinstance(named, str):
            named = (PromptSource(source=named, split=self.split, revision=self.revision),)
        read = (source for source in named if source.source != "self")
        return tuple(source.model_copy(update={"split": source.split or self.split}) for source in read)

    @property
    def self_share(self) -> float:
        """Fraction of prompts that the target writes itself."""
        if isinstance(self.prompts, str):
            return float(self.prompts == "self")
        weights = [(source.source == "self", source.weight) for source in self.prompts]
        return sum(weight for own, weight in weights if own) / sum(weight for _, weight in weights)

    @field_validator("prompts", mode="before")
    @classmethod
    def _each_source(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, dict | PromptSource):
            value = (value,)
        if not isinstance(value, list | tuple) or not value:
            raise UserError(
                f"Recipe key 'data.prompts' is {value!r}.",
                "Give 'self', a .jsonl or .json file, a datasets name, or a list of {source, weight}.",
            )
        return tuple(_source(source, number) for number, source in enumerate(value, start=1))

    @model_validator(mode="after")
    def _one_revision_each(self) -> DataSection:
        if self.revision is not None and not isinstance(self.prompts, str):
            raise UserError(
                f"data.revision is {self.revision!r}, and data.prompts names several sources.",
                "Give each source its own: data.prompts=[{source: .., revision: ..}, ..].",
            )
        return self

    @model_validator(mode="after")
    def _answers_for_all(self) -> DataSection:
        if not self.regenerate and 0 < self.self_share < 1:
            raise UserError(
                "data.regenerate=false keeps the answers of files, and prompts that the target writes have none.",
                "Leave 'self' out of data.prompts, or let the target answer all of them.",
            )
        return self


class TrainSection(Section):
    """The training loop."""

    steps: Annotated[int | None, Role.AMOUNT] = Field(
        None, ge=1, description="Optimiser steps; with minutes, whichever ends first."
    )
    minutes: Annotated[float | None, Role.AMOUNT] = Field(
        None, gt=0, description="Wall-clock budget; the schedule follows the clock."
    )
    epochs: Annotated[int, Role.AMOUNT] = Field(50, ge=1, description="Most passes over the data.")
    batch_tokens: int = Field(4096, ge=64, description="Tokens of a batch, padding included.")
    packing: bool = Field(
        False, description="Pack the conversations of a batch into one row without padding; none attends to another."
    )
    anchors: int | None = Field(
        None,
        ge=1,
        description="Most positions of a conversation that drafts start from, drawn anew for each batch; null uses "
        "all. Block drafters run one block for each.",
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="Batches per optimiser step.")
    gradient_checkpointing: Annotated[bool, Role.RUNTIME] = Field(
        False, description="Recompute activations inside layers for the gradients: less memory, more time."
    )
    compile: Annotated[bool | Literal["auto"], Role.RUNTIME] = Field(
        "auto",
        description="Compile layers, attention and loss with torch.compile, which takes a minute or two at the start; "
        "auto compiles on a GPU. If compilation fails, training logs the reason and runs uncompiled.",
    )
    shard_target: Annotated[bool, Role.RUNTIME] = Field(
        False,
        description="With data.states=online on several processes: each holds a part of the target's weights, by "
        "transformers' tensor parallelism, and all run every forward.",
    )
    prefetch: Annotated[int, Role.RUNTIME] = Field(
        2, ge=0, description="Number of steps to prefetch batches for; 0 reads each on demand."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon orthogonalises the updates of matrices, of each in one of two steps; LM heads, norms and "
        "biases use AdamW.",
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    min_lr_ratio: float = Field(0.05, ge=0, le=1, description="Final learning rate, as a share of the peak.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the run spent warming up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW betas.")
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True, description="Gradient norm limit; .inf is none.")
    loss: LossName = Field(
        "soft_ce",
        description="Loss between draft and target distributions: cross-entropy (soft_ce, and hard_ce against the "
        "target's likeliest token), or with nine tenths (tv_ce) or half (half_l1) of it the L1 distance.",
    )
    loss_tokens: int = Field(
        0,
        ge=0,
        description="Candidates for sampled softmax: 80 % most likely under the target in a batch, 20 % random; 0 is "
        "the full draft vocabulary. Saves work where that is large.",
    )
    position_weight: PositionWeight = Field(
        "exponential",
        description="How much step k of a draft counts. exponential: step_weight to the power k; subsampled: the same "
        "on average, computed for that share of the drafts only; dpace: by its gain in expected length.",
    )
    step_weight: float = Field(0.8, gt=0, le=1, description="Step k of a draft weighs this to the power k.")
    feature_weight: float = Field(
        0.0, ge=0, description="Weight of a smooth L1 loss between drafted features and final states; 0 is none."
    )
    start_from: str | None = Field(
        None, description="Folder of heads of a family that can start these; weights of the same shape are reused."
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="Train only low-rank updates, of this rank, of the heads in start_from; 0 trains all weights.",
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field("auto", description="auto follows the target.")
    eval_every: Annotated[int, Role.RUNTIME] = Field(100, ge=1, description="Optimiser steps between validations.")
    save_every: Annotated[int, Role.RUNTIME] = Field(200, ge=1, description="Optimiser steps between checkpoints.")
    keep_checkpoints: Annotated[int, Role.RUNTIME] = Field(
        2, ge=1, description="How many of the newest checkpoints are kept."
    )
    log_every: Annotated[int, Role.RUNTIME] = Field(10, ge=1, description="Optimiser steps between logged losses.")
    tracker: Annotated[Literal["none", "wandb", "trackio", "tensorboard"], Role.RUNTIME] = Field(
        "none", description="accelerate tracker."
    )
    project: Annotated[str, Role.RUNTIME] = Field("headstart", description="Project name for the tracker.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of initialisation and batch order.")

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML reads `no` as false

    @field_validator("loss_tokens")
    @classmethod
    def _enough(cls, tokens: int) -> int:
        if 0 < tokens < _FEWEST_TOKENS:
            raise ValueError(f"a loss is over {_FEWEST_TOKENS} tokens at least, or with 0 over all")
        return tokens


class TuneSection(Section):
    """Measuring costs and choosing the tree."""

    widths: tuple[_Width, ...] = Field(
        (1, 2, 4, 6, 8, 12, 16, 24, 32, 64), min_length=1, description="Node counts to time verification at."
    )
    context: int = Field(256, ge=8, description="Tokens in the cache while timing.")
    max_nodes: int = Field(64, ge=1, le=1024, description="Largest tree in nodes, root included.")
    max_rank: int = Field(10, ge=1, description="Candidate drafts considered at each depth.")


class EvalSection(Section):
    """The report at the end of a run."""

    questions: str = Field("heldout", description="'heldout' (the run's own held-out prompts) or a question file.")
    limit: int | None = Field(16, ge=1, description="Most prompts measured.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer in tokens, its end token included.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy; above 0 samples the target's distribution.")
    compare: tuple[str, ...] = Field(
        ("heads+ngram",),
        description="Other drafters in the report, see `headstart eval --compare`; ignored with eval.engine.",
    )
    engine: Literal["vllm", "llama.cpp", "auto"] | None = Field(
        None,
        description=f"Serving engine ({ENGINES}) that the run starts to measure with and without heads. auto means the "
        "engine of data.server, if it can serve the heads; null measures headstart's own decoding.",
    )
    engine_command: Annotated[str, Role.RUNTIME] = Field(
        "", description="Command that starts eval.engine; empty for data.server_command."
    )
    engine_arguments: str = Field("", description="Further arguments for eval.engine; empty for data.server_arguments.")

    @model_validator(mode="after")
    def _options_of_an_engine(self) -> Self:
        for name in ("engine_command", "engine_arguments"):
            if split_words(getattr(self, name), f"eval.{name}") and self.engine is None:
                raise UserError(f"eval.{name} is for an engine that the run starts.", f"Set eval.engine: {ENGINES}.")
        return self


class ExportSection(Section):
    """What the heads are for."""

    formats: Annotated[tuple[FormatName, ...], Role.RUNTIME] = Field(
        (),
        description="Engine formats to export to later: head settings that do not fit a format are refused before any "
        "work.",
    )


def _source(value: Any, number: int) -> PromptSource:
    """Validate one source of a list; a UserError names its number."""
    try:
        source = PromptSource.model_validate({"source": value} if isinstance(value, str) else value)
    except ValidationError as error:
        mistake = max(error.errors(), key=lambda mistake: mistake["type"] == "extra_forbidden")
        name = str(mistake["loc"][-1]) if mistake["loc"] else ""
        if mistake["type"] == "extra_forbidden":
            remedy = f"A source has {', '.join(PromptSource.model_fields)}."
            raise UserError(f"Source {number} of data.prompts has an unknown key {name!r}.", remedy) from None
        raise UserError(
            f"Source {number} of data.prompts is {value!r}: {name} {mistake['msg'].lower()}.",
            "Write {source: FILE.jsonl, weight: 2}; the weight is above 0.",
        ) from None
    return source
