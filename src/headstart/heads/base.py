"""The contract of a draft head, and the registry that finds the families.

A family is one file in this folder: a config class, a module class, `@register`. Everything else (training, tree
decoding, tuning, export, reports, the test suite) follows from this contract and never names a family.

Shape suffixes: B rows, T tokens, E hidden size, D draft vocabulary, V vocabulary, M predictions of one step, H width of
what an LM head reads, W nodes of a level.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from headstart.errors import UserError, nearest
from headstart.heads.exchange.published import SHARED, Layout, Published, detached, fill
from headstart.heads.int8_weights import drop_int8
from headstart.recipes.recipe import parse_heads
from headstart.recipes.sections import FromTarget, HeadSettings
from headstart.target import few_rows
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.target.lm_head import Finish
from headstart.target.model import Target
from headstart.tree.tree import Committed, Request, Tree, TreeShape

R = TypeVar("R")


class HeadConfig(HeadSettings):
    """What every family's config has in common: what a recipe sets, and the sizes of the target. Families add fields;
    one that is the target's own where a recipe leaves it out is marked with `FromTarget`."""

    hidden_size: Annotated[int, FromTarget(settable=False)] = Field(
        0, ge=0, le=1 << 24, description="Hidden size of the target."
    )
    vocab_size: Annotated[int, FromTarget(settable=False)] = Field(
        0, ge=0, le=1 << 24, description="Vocabulary of the target."
    )

    @property
    def draft_width(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def start_layers(self) -> int:
        """How many of the target's last layers `warm_start` may read; a teacher keeps as many."""
        return 1

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings marked with `FromTarget`, for families that have any; `settings` are those of the recipe. A
        `UserError` says that the family cannot serve this target."""
        return {}


@dataclass
class HeadBatch:
    """A batch of conversations with the target's hidden states, padded on the right.

    Attributes:
        supervised_BT: the loss mask, true where the token was written by the target; false on padding.
        states: {layer: [B, T, E]}; state t was computed after reading token t.
        subsampled_steps_BT: how many draft steps learn from each position as their origin; None for all. An origin
            with 0 steps is no anchor.
        starts_BT: where several conversations share a row, the position at which each token's own begins; its first
            token is then not supervised, so that no draft goes from one into the next. None: a row is one conversation.
    """

    tokens_BT: Tensor
    supervised_BT: Tensor
    states: dict[int, Tensor]
    subsampled_steps_BT: Tensor | None = None
    starts_BT: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> HeadBatch:
        """The batch with every tensor changed."""
        optional = (self.subsampled_steps_BT, self.starts_BT)
        return HeadBatch(
            change(self.tokens_BT),
            change(self.supervised_BT),
            {layer: change(state_BTE) for layer, state_BTE in self.states.items()},
            *(None if tensor is None else change(tensor) for tensor in optional),
        )


@dataclass
class StepPrediction:
    """What one draft step (or one head) predicts over a batch; a loss computes the logits a few rows at a time.

    Attributes:
        hidden_MH: what the LM head reads.
        teacher_M: flat index b * T + s of position s = t + k + 1 of row b (see `origin_M`); the token predicted is
            number s + 1. The label is the target's distribution there, by the FINAL state of s.
        origin_M: flat index b * T + t of the position t the drafting started from: step k (from 0) predicts token
            t + k + 2.
        feature_ME: the head's guess of the FINAL state at `teacher_M`, for families that draft features.
        bias_D: of the LM head, where it is the target's and has one.
        finish: what becomes of the LM head's output: what the target does to its own, where the LM head is the
            target's.
        frozen_columns: how many of the LM head's first columns do not learn, where others do.
        confidence_M: logits of the probability that a draft drawn here is accepted, for families that say so.
    """

    hidden_MH: Tensor
    lm_head_DH: Tensor
    teacher_M: Tensor
    origin_M: Tensor
    feature_ME: Tensor | None = None
    bias_D: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    frozen_columns: int = 0
    confidence_M: Tensor | None = None

    @property
    def logits_MD(self) -> Tensor:
        logits_MD = F.linear(self.hidden_MH, self.lm_head_DH, self.bias_D)
        return logits_MD if self.finish is None else self.finish(logits_MD)


class DraftHead(nn.Module, ABC):
    """A head family. Training (`unroll`) and drafting (`prefill`, `draft_step`, `commit`, `reorder`) are separate
    methods.

    A family drafts in one of two ways: level by level (`draft_step`, and `draft_tree` where all levels are one call),
    when what it says after a node depends on the tokens on the way there, or all depths in one forward
    (`OneForwardHead`).

    Attributes:
        version: what names these heads in answers and logs, see `headstart.heads.io.version_of`; empty for heads that
            were not read from an exported folder.
        drafts_features: whether its predictions hold a `feature_ME`.
        publishes: the published arrangement that it can be, if there is one; engines read those alone.
        draft_to_target_D: the target's token id of each draft token (the identity without a draft vocabulary).
        lm_bias_D: bias of the target's LM head, for heads that read logits through it.
        finish: what the target does to its logits, likewise.
        gradient_checkpointing: whether what training computes inside of layers is computed again for the gradients.
    """

    family: ClassVar[str]
    Config: ClassVar[type[HeadConfig]]
    drafts_features: ClassVar[bool] = False
    publishes: ClassVar[Layout | None] = None
    gradient_checkpointing: bool = False
    version: str = ""
    config: HeadConfig
    draft_to_target_D: Tensor
    lm_bias_D: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        config.check()
        super().__init__()
        self.config = config
        self.finish: Finish | None = None
        self._embedding_VE: Tensor | None = None
        self.register_buffer("draft_to_target_D", torch.arange(config.draft_width))
        self.register_buffer("lm_bias_D", None, persistent=False)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def draft_steps(self) -> int:
        """K: how deep it can draft."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads, counted as transformers' `hidden_states`: 0 is the
        embeddings, n the output of the n-th layer, and FINAL the last one's after the final norm."""
        return (FINAL,)

    @property
    def bytes_per_token(self) -> int:
        """What drafting keeps of each token of a row: the states of its layers, as long as they are not read."""
        return len(self.aux_layers) * self.config.hidden_size * self._item

    @property
    def _item(self) -> int:
        return next((parameter.element_size() for parameter in self.parameters()), torch.float32.itemsize)

    @abstractmethod
    def warm_start(self, target: FrozenModel) -> None:
        """Initialise from the target's own weights, in place. `draft_to_target_D` is set already."""

    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Improve on the warm start in closed form, in place, from a pass over some data; by default nothing."""

    def before_training(self, batches: Iterable[HeadBatch]) -> None:
        """Look at what training may take as given, now that every weight is in place; by default nothing."""

    def bind(self, target: FrozenModel) -> None:
        """Take references to frozen weights of the target that are not saved with the heads; called after loading."""

    # -- the weights of the target -------------------------------------------------------------------------------

    @property
    def target_embeddings(self) -> Tensor:
        """The target's embeddings [V, E], for families that take them when they are bound."""
        assert self._embedding_VE is not None, "heads are bound to their target"
        return self._embedding_VE

    def embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The target's embeddings of tokens [...], [..., E], in the dtype and on the device of `like`."""
        if (table_VE := self.embedding_table(like)) is not None and (functions := few_rows.serves(like)):
            return few_rows.embedding(functions, table_VE, tokens)
        table_VE = self.target_embeddings
        return F.embedding(tokens.to(table_VE.device), table_VE).to(like)

    def embedding_table(self, like: Tensor) -> Tensor | None:
        """The target's embeddings where they are plain numbers in the dtype of `like` on a CPU, as C reads them."""
        table_VE = self.target_embeddings
        plain = type(table_VE) in (Tensor, nn.Parameter) and table_VE.is_cpu and table_VE.is_contiguous()
        return table_VE if plain and table_VE.dtype == like.dtype else None

    def frozen_lm_head(self, target: FrozenModel, like: Tensor) -> Tensor:
        """The target's LM head over the draft vocabulary, [D, E], for heads that read logits through it, in the dtype
        and on the device of `like`; sets `lm_bias_D` and `finish`, which belong to such logits."""
        bias_V = target.lm_head_bias
        self.lm_bias_D = None if bias_V is None else self._drafted(bias_V.detach()).to(like)
        self.finish = target.finish
        return self._drafted(target.lm_head_weight.detach()).to(like)

    def first_lm_head(self, target: FrozenModel) -> Tensor:
        """What an LM head of the heads' own starts from, [D, E]: the target's, with the scale of its logits. Such heads
        have no bias or cap, in training and in the engines that serve them."""
        weight_DE, scale = self._drafted(target.lm_head_weight.detach()), target.finish.scale
        return weight_DE if scale == 1 else weight_DE * scale

    def _drafted(self, rows_V: Tensor) -> Tensor:
        if not self.config.draft_vocab_size:
            return rows_V[: len(self.draft_to_target_D)]
        return rows_V[self.draft_to_target_D.to(rows_V.device)]

    def finished(self, logits: Tensor) -> Tensor:
        """Draft logits from the output of the LM head."""
        return logits if self.finish is None else self.finish(logits)

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only these tokens of the target (sorted int64 [D])."""
        assert token_ids.shape == self.draft_to_target_D.shape, "the vocabulary has the configured size"
        self.draft_to_target_D.copy_(token_ids)

    # -- exchange ------------------------------------------------------------------------------------------------

    @property
    def publishing_reads_target(self) -> bool:
        """Whether `publish` needs the heads to be bound to their target."""
        return False

    def by_published_name(self) -> dict[str, Tensor]:
        """The weights as they are published, in the heads' own memory; see `published`."""
        return {}

    def publish(self) -> Published:
        """The heads as serving engines know them; the tensors are copies on the CPU.

        Raises:
            UserError: no engine knows such heads, or not with these settings.
        """
        if self.publishes is None:
            raise UserError(
                f"No serving engine knows {self.family} heads.",
                "Decode with headstart or transformers (--format headstart); for serving engines train eagle3 heads.",
            )
        return Published(
            layout=self.publishes,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            steps=self.draft_steps,
            tensors=detached(self.by_published_name()),
            layer=getattr(self.config, "published_sizes", None),
            **{name: getattr(self.config, name) for name in SHARED if hasattr(self.config, name)},
        )

    def in_checkpoint(self) -> dict[str, Tensor]:
        """What training changed of the target's own checkpoint, by its names there; see `publish` for others.

        Raises:
            UserError: the heads are no part of one.
        """
        raise UserError(
            f"The target's checkpoint has no place for {self.family} heads of their own layout.",
            "Train the module that the target ships (heads.family=mtp heads.init=native), or export these heads for an "
            "engine.",
        )

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        """Settings of heads that hold what was published."""
        shared = {name: getattr(published, name) for name in SHARED}
        given = {**published.head_settings, **shared, "draft_steps": published.steps}
        return {name: value for name, value in given.items() if name in cls.Config.model_fields} | {
            "family": cls.family
        }

    @classmethod
    @torch.no_grad()
    def from_published(cls, published: Published, target: Target) -> Self:
        """Heads of this family, bound to their target, from the arrangement that the family `publishes`, with all of
        its tensors in their shapes; `publish` gives the same again.

        Raises:
            UserError: a variant that the family does not have.
        """
        heads = cls(cls.Config.model_validate(cls.settings_of(published)))
        fill(heads.by_published_name(), published.tensors)
        if published.draft_ids_D is not None:
            heads.set_draft_vocabulary(published.draft_ids_D)
        heads.bind(target)
        return heads

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As torch's; training mode drops the weights in 8 bits, which would not learn."""
        if mode:
            drop_int8(self)
        return super().train(mode)

    @property
    def trainable_parameters(self) -> int:
        """How many numbers training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def learning_rows(self) -> dict[str, list[slice]]:
        """By name, the rows of weights in which several matrices lie one below the other, for an optimiser that treats
        a matrix as a whole. `unroll` gives rows that are in none of them no gradient."""
        layers = [(path, module) for path, module in self.named_modules() if path and hasattr(module, "learning_rows")]
        return {f"{path}.{name}": rows for path, layer in layers for name, rows in layer.learning_rows().items()}

    def light(self, function: Callable[..., R], *inputs: Any) -> R:
        """What a function, which draws no random numbers, makes of its inputs; with `gradient_checkpointing` only these
        are kept for the gradients."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return function(*inputs)
        made: R = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return made

    @abstractmethod
    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        """Predictions of each step in turn, at the positions where every token up to the predicted one is supervised;
        one at a time, so that the logits of all steps never exist at once."""

    def prediction(
        self, hidden_MH: Tensor, lm_head_DH: Tensor, origin_M: Tensor, step: int, feature_ME: Tensor | None = None
    ) -> StepPrediction:
        """What a draft step predicts from these origins; see `StepPrediction`."""
        of_target = (self.lm_bias_D, self.finish)
        return StepPrediction(hidden_MH, lm_head_DH, origin_M + step + 1, origin_M, feature_ME, *of_target)

    # -- drafting ------------------------------------------------------------------------------------------------

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch of prompts, with the states {layer: [B, T, E]} of their prefill, padded on the
        right; returns the session that `draft_step`, `commit` and `reorder` take."""

    def read_text(self, session: Any, check: Callable[[], None] | None) -> None:
        """Read a long text that is pending, a piece at a time, after `check`; by default `prefill` has read it."""

    @abstractmethod
    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        """Draft after the nodes of one level of a tree; the levels of a round come in order.

        Args:
            session: from `prefill`.
            tokens_BW: those of the nodes at this depth that get children. Level 0 is each row's root alone. Rows with
                fewer nodes are padded.
            parents_BW: index of each node's parent in the level before, on the host; 0 at level 0.
            depth: of these nodes, from 0 to `draft_steps` - 1.

        Returns:
            logits [B, W, D] over the draft vocabulary for their children; [B, 1, D] when all nodes of a level share
            them.
        """

    def draft_tree(self, session: Any, root: int, request: Request, ranks: int) -> Tree | None:
        """The tree of a single row that `grow` (see `headstart.drafters.heads`) makes of levels, in one call where a
        family has that: without a static shape or drawn children, and with so many children of a node at most. None
        where it is to be grown level by level."""
        return None

    @abstractmethod
    def commit(self, session: Any, committed: Committed) -> None:
        """Learn what was accepted: the tokens committed in this round, root first, and their states."""

    @abstractmethod
    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    # -- what can be asked of all --------------------------------------------------------------------------------

    def check_tree(self, shape: TreeShape) -> None:
        """Refuse a tree that is deeper than the heads, or wider than their draft vocabulary."""
        remedy = "Tune the heads again (headstart tune), or export them with the tree that was tuned for them."
        if shape.depth > self.draft_steps:
            raise UserError(
                f"The tree is {shape.depth} deep and the heads draft {self.draft_steps} tokens ahead.", remedy
            )
        if shape.width > self.config.draft_width:
            raise UserError(
                f"The tree uses {shape.width} drafts of a depth and the draft vocabulary has "
                f"{self.config.draft_width} tokens.",
                remedy,
            )

    @torch.enable_grad()  # products whose gradients are wanted are torch's own, which it counts
    def flops_per_draft(self) -> int:
        """Floating-point operations of one drafted token, LM head included; a multiply-add is two. Counted over a chain
        of `draft_steps` drafts after a text of one token. Attention is left out: it depends on the text, and torch
        counts it on some devices only."""
        where = self.draft_to_target_D.device
        dtype = next((p.dtype for p in self.parameters()), torch.float32)
        state_11E = torch.zeros(1, 1, self.config.hidden_size, dtype=dtype, device=where, requires_grad=True)
        root_11, parent_11 = torch.zeros(1, 1, dtype=torch.long, device=where), torch.zeros(1, 1, dtype=torch.long)

        def draft_chain() -> None:
            session = self.prefill([[0]], dict.fromkeys(self.aux_layers, state_11E))
            for depth in range(self.draft_steps):
                self.draft_step(session, root_11, parent_11, depth)

        draft_chain()  # makes the tables of rotary positions, which are no part of a draft
        with FlopCounterMode(display=False) as counter:
            draft_chain()
        counts = counter.get_flop_counts()["Global"].items()
        return sum(int(count) for operation, count in counts if "attention" not in str(operation)) // self.draft_steps


class OneForwardHead(DraftHead):
    """A family whose drafts at a depth do not depend on which tokens were drafted before: one forward gives them all.

    On a device all depths are read back at once; where reading back is free, a depth is asked for when the one before
    was worth it, so that LM heads of depths that nobody verifies are not computed.
    """

    @abstractmethod
    def depth_logits(self, session: Any, root_B: Tensor, depths: range) -> Tensor:
        """Logits [B, len(depths), D] of the tokens at these depths (0 is the root's child) after each row's root.

        The calls of a round come in order and never twice; the first may keep in `session` what it computes for all.
        """

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        return self.depth_logits(session, tokens_BW[:, 0], range(depth, depth + 1))


def supervised_origins(supervised_BT: Tensor, step: int) -> Tensor:
    """Flat indices b * T + t from which draft step `step` learns: tokens t + 1 .. t + step + 2 are all supervised, so
    that they belong to one answer, as when decoding."""
    window = step + 2
    if supervised_BT.shape[1] <= window:
        return torch.zeros(0, dtype=torch.long, device=supervised_BT.device)
    valid_BT = torch.zeros_like(supervised_BT)
    stop = supervised_BT.shape[1] - window
    valid_BT[:, :stop] = supervised_BT.unfold(1, window, 1)[:, 1:].all(-1)
    return valid_BT.flatten().nonzero()[:, 0]


def origins(batch: HeadBatch, step: int) -> Tensor:
    """Flat indices from which draft step `step` of a batch learns: `supervised_origins`, as far as
    `subsampled_steps_BT` lets them."""
    origin_M = supervised_origins(batch.supervised_BT, step)
    if batch.subsampled_steps_BT is None:
        return origin_M
    return origin_M[batch.subsampled_steps_BT.flatten()[origin_M] > step]


_FAMILIES: dict[str, type[DraftHead]] = {}

H = TypeVar("H", bound=type[DraftHead])


def register(head: H) -> H:
    """Class decorator: make a family known under its `family` name."""
    _FAMILIES[head.family] = head
    return head


def families() -> dict[str, type[DraftHead]]:
    """All families by name: every module of this folder is imported once, so a new file is enough."""
    package = importlib.import_module("headstart.heads")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"headstart.heads.{module.name}")
    return dict(_FAMILIES)


def family(name: str) -> type[DraftHead]:
    """The family called `name`; a `UserError` names the nearest where there is none."""
    known = families()
    if name not in known:
        raise UserError(f"Unknown head family {name!r}.", nearest(name, known))
    return known[name]


def make_config(settings: HeadSettings | Mapping[str, Any], target: FrozenModel) -> HeadConfig:
    """A family's config from recipe settings, with what follows from the target filled in."""
    given = settings if isinstance(settings, HeadSettings) else parse_heads(settings)
    assert isinstance(given, HeadConfig), "a family's settings are its config"
    from_recipe = given.to_recipe()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config = parse_heads({**given.of_target(target, from_recipe), **from_recipe, **sizes})
    assert isinstance(config, HeadConfig)
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"A draft vocabulary of {config.draft_vocab_size} is larger than the target's {target.vocab_size}.",
            "Lower heads.draft_vocab_size, or set it to 0 for the whole vocabulary.",
        )
    return config
