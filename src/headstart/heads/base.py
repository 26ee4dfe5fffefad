"""The draft-head contract and the registry of families.

A family is one file in this folder: a config class, a module class, `@register`. Training, tree decoding, tuning and
reports go through this contract and have no code for a single family. Some errors here, and the serving engines'
formats in `hub/engines`, name families.

Shape suffixes: B rows, T tokens, E hidden size, D draft vocabulary, V vocabulary, M predictions of one step, H LM head
inputs, W nodes of a level.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from headstart.errors import UserError, close, nearest
from headstart.heads.candidates import Candidates
from headstart.heads.exchange.published import SHARED, Layout, Published, copy_to_cpu
from headstart.heads.int8_weights import drop_int8
from headstart.heads.settings import FromTarget, HeadSettings, recipe_error, section_fields
from headstart.model.frozen import FrozenModel
from headstart.model.lm_head import LogitTransform
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.support.regions import call_compiled
from headstart.support.uploads import upload
from headstart.tree.tree import Committed, Request, Tree, TreeShape

R = TypeVar("R")


class HeadConfig(HeadSettings):
    """Base of family configs: recipe settings and target sizes. Fields marked `FromTarget` default to the target's."""

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
        """Number of final target layers that `warm_start` reads; a `TeacherModel` keeps only these."""
        return 1

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the target's values of the `FromTarget` fields, given the recipe's settings. Raises a UserError for an
        unsuitable target."""
        return {}


@dataclass
class HeadBatch:
    """A batch of conversations with the target's hidden states, padded on the right.

    Tokens and states are on the heads' device. Masks and starts stay on the host, so planning the origins of all
    steps needs no device synchronisation.

    Attributes:
        supervised_BT: the loss mask, true for tokens that the target generated.
        states: {layer: [B, T, E]}; state t is the target's after reading token t.
        subsampled_steps_BT: number of draft steps to train from each origin; None for all steps.
        starts_BT: in packed rows, the start of each token's conversation, whose first token is not supervised, so that
            no draft crosses a boundary. None for one conversation per row.
    """

    tokens_BT: Tensor
    supervised_BT: Tensor
    states: dict[int, Tensor]
    subsampled_steps_BT: Tensor | None = None
    starts_BT: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> HeadBatch:
        """Apply a function to tokens and states, for example to move them to a device."""
        states = {layer: change(state_BTE) for layer, state_BTE in self.states.items()}
        return replace(self, tokens_BT=change(self.tokens_BT), states=states)


@dataclass
class StepPrediction:
    """Predictions of one draft step (or head) over a batch; losses compute the logits in chunks.

    Attributes:
        hidden_MH: input of the LM head.
        origin_M: flat index b * T + t of the draft's origin t in row b. Step k (from 0) predicts token t + k + 2.
        teacher_M: flat index b * T + t + k + 1 of the FINAL state from which the target predicts the same token.
        feature_ME: predicted FINAL state at `teacher_M`, for families that draft features.
        bias_D, logit_transform: bias and logit post-processing of the target's LM head, for heads that use it.
        frozen_columns: number of leading LM head columns that stay frozen.
        confidence_M: logit of the acceptance probability, for families with a confidence head.
        candidates: pairwise scores of the most likely drafts, for families that draft by them.
    """

    hidden_MH: Tensor
    lm_head_DH: Tensor
    teacher_M: Tensor
    origin_M: Tensor
    feature_ME: Tensor | None = None
    bias_D: Tensor | None = None
    logit_transform: Callable[[Tensor], Tensor] | None = None
    frozen_columns: int = 0
    confidence_M: Tensor | None = None
    candidates: Candidates | None = None

    @property
    def logits_MD(self) -> Tensor:
        return self.select(F.linear(self.hidden_MH, self.lm_head_DH, self.bias_D), slice(None))

    def rows(self, rows: slice | list[int]) -> StepPrediction:
        """Keep the inputs of the logits of these rows."""
        candidates = None if self.candidates is None else self.candidates.rows(rows)
        return replace(self, hidden_MH=self.hidden_MH[rows], candidates=candidates)

    def select(self, product_BD: Tensor, block: slice) -> Tensor:
        """Return the logits to draft from, given the LM head's product for a block of rows."""
        logits_BD = product_BD if self.logit_transform is None else self.logit_transform(product_BD)
        return logits_BD if self.candidates is None else self.candidates.rows(block).select(logits_BD)[:, 0]


class DraftHead(nn.Module, ABC):
    """Base class of head families: training (`unroll`) and drafting (`prefill`, `draft_step`, `commit`, `reorder`).

    A family drafts level by level if its drafts depend on the path to a node, else all depths in one forward
    (`OneForwardHead`).

    Attributes:
        version: identifies heads of an exported folder in answers and logs, see `headstart.heads.io.version_of`.
        drafts_features: whether predictions have a `feature_ME`.
        publishes: layout of the heads for serving engines, if any.
        starts_from: another family with heads that `train.start_from` accepts.
        fits_new_parts: whether the parts that heads of `starts_from` lack need the closed-form fit.
        draft_to_target_D: target token id of each draft token; the identity without a draft vocabulary.
        lm_bias_D, logit_transform: bias and logit post-processing of the target's LM head, for heads that use it.
        gradient_checkpointing: whether training recomputes activations inside layers for the backward pass.
        compiled: whether training compiles its regions (layers and attention).
    """

    family: ClassVar[str]
    Config: ClassVar[type[HeadConfig]]
    drafts_features: ClassVar[bool] = False
    publishes: ClassVar[Layout | None] = None
    starts_from: ClassVar[str] = ""
    fits_new_parts: ClassVar[bool] = True
    gradient_checkpointing: bool = False
    compiled: bool = False
    version: str = ""
    config: HeadConfig
    draft_to_target_D: Tensor
    lm_bias_D: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        config.check()
        super().__init__()
        self.config = config
        self.logit_transform: LogitTransform | None = None
        self._embedding_VE: Tensor | None = None
        self.register_buffer("draft_to_target_D", torch.arange(config.draft_width))
        self.register_buffer("lm_bias_D", None, persistent=False)

    @property
    @abstractmethod
    def draft_steps(self) -> int:
        """Maximum draft depth K."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers to read: 0 is the embeddings, n the output of layer n, and FINAL the last output after the
        final norm. As transformers' `hidden_states`, except that the last entry there is FINAL."""
        return (FINAL,)

    @property
    def bytes_per_token(self) -> int:
        """Drafting memory per token of a row; here the pending target states."""
        return len(self.aux_layers) * self.config.hidden_size * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        return next((parameter.dtype for parameter in self.parameters()), torch.float32)

    @abstractmethod
    def warm_start(self, target: FrozenModel) -> None:
        """Initialise from the target's weights, in place, after `set_draft_vocabulary`."""

    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Refine the warm start in closed form, in place, from one pass over some data; a no-op by default."""

    def before_training(self, batches: Iterable[HeadBatch]) -> None:
        """Freeze the weights that can stay frozen on this data, once all weights are loaded; a no-op by default."""

    def bind(self, target: FrozenModel) -> None:
        """Reference the target's frozen weights, which are not saved with the heads. Called after loading."""
        self._embedding_VE = target.embedding_weight.detach()

    # -- weights of the target -----------------------------------------------------------------------------------

    @property
    def target_embeddings(self) -> Tensor:
        """Embeddings [V, E] of the target."""
        assert self._embedding_VE is not None, "heads are bound to their target"
        return self._embedding_VE

    def embed_tokens(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Embed tokens [...] as the target does, [..., E], in the dtype and on the device of `like`."""
        table_VE = self.target_embeddings
        return F.embedding(tokens.to(table_VE.device), table_VE).to(like)

    def frozen_lm_head(self, target: FrozenModel, like: Tensor) -> Tensor:
        """Return the target's LM head over the draft vocabulary, [D, E], in the dtype and on the device of `like`. Sets
        `lm_bias_D` and `logit_transform` too."""
        bias_V = target.lm_head_bias
        self.lm_bias_D = None if bias_V is None else self._draft_rows(bias_V.detach()).to(like)
        self.logit_transform = target.logit_transform
        return self._draft_rows(target.lm_head_weight.detach()).to(like)

    def first_lm_head(self, target: FrozenModel) -> Tensor:
        """Return the initial value of a trained LM head, [D, E]: the target's, times its logit scale. Trained LM heads
        have no bias or cap, in training and in serving engines."""
        weight_DE, scale = self._draft_rows(target.lm_head_weight.detach()), target.logit_transform.scale
        return weight_DE if scale == 1 else weight_DE * scale

    def _draft_rows(self, rows_V: Tensor) -> Tensor:
        if not self.config.draft_vocab_size:
            return rows_V[: len(self.draft_to_target_D)]
        return rows_V[self.draft_to_target_D.to(rows_V.device)]

    def transform_logits(self, logits: Tensor) -> Tensor:
        return logits if self.logit_transform is None else self.logit_transform(logits)

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Restrict drafts to these target tokens (sorted int64 [D])."""
        assert token_ids.shape == self.draft_to_target_D.shape, "the vocabulary has the configured size"
        self.draft_to_target_D.copy_(token_ids)

    # -- exchange ------------------------------------------------------------------------------------------------

    @property
    def publishing_reads_target(self) -> bool:
        """Whether `publish` needs bound heads."""
        return False

    def by_published_name(self) -> dict[str, Tensor]:
        """Views of the weights under their published names; see `published`."""
        return {}

    def publish(self) -> Published:
        """Convert to the layout of serving engines, copying the tensors to the CPU. Raises a UserError if no engine
        supports such heads, or not with these settings."""
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
            tensors=copy_to_cpu(self.by_published_name()),
            layer=getattr(self.config, "published_sizes", None),
            **{name: getattr(self.config, name) for name in SHARED if hasattr(self.config, name)},
        )

    def in_checkpoint(self) -> dict[str, Tensor]:
        """Return the trained tensors under their names in the target's own checkpoint. Raises a UserError for heads
        that are not part of it."""
        raise UserError(
            f"The target's checkpoint cannot hold these {self.family} heads.",
            "Train the module that the target ships (heads.family=mtp heads.init=native), or export these heads for an "
            "engine.",
        )

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        """Return the settings of heads that can hold the published tensors."""
        settings = {
            **({} if published.layer is None else asdict(published.layer)),
            "hidden_size": published.hidden_size,
            "vocab_size": published.vocab_size,
            "draft_vocab_size": 0 if published.draft_ids_D is None else published.draft_width,
            "draft_steps": published.steps,
            **{name: getattr(published, name) for name in SHARED},
        }
        return {name: value for name, value in settings.items() if name in cls.Config.model_fields}

    @classmethod
    @torch.no_grad()
    def from_published(cls, published: Published, target: Target) -> Self:
        """Build heads from a checked `Published` of this family's layout and bind them to the target. Raises a
        UserError for a variant that the family does not support."""
        heads = cls(cls.Config.model_validate(cls.settings_of(published)))
        for name, weight in heads.by_published_name().items():  # missing biases are zero
            has_value = name in published.tensors or not name.endswith("bias")
            weight.copy_(published.tensors[name] if has_value else torch.zeros_like(weight))
        if published.draft_ids_D is not None:
            heads.set_draft_vocabulary(published.draft_ids_D)
        heads.bind(target)
        return heads

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Training mode drops the int8 weights."""
        if mode:
            drop_int8(self)
        return super().train(mode)

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def trainable_rows(self) -> dict[str, list[slice]]:
        """Row ranges of the matrices stacked in one weight, by weight name, for optimisers that update matrix by
        matrix. Other rows get no gradient from `unroll`."""
        layers = [(path, module) for path, module in self.named_modules() if path and hasattr(module, "trainable_rows")]
        return {f"{path}.{name}": rows for path, layer in layers for name, rows in layer.trainable_rows().items()}

    @property
    def uses_flex(self) -> bool:
        """Whether this forward uses flex attention, which has no backward on a CPU."""
        return self.compiled and self.training and self.draft_to_target_D.device.type != "cpu"

    def run_region(self, function: Callable[..., R], *inputs: Any, compiles: bool = True) -> R:
        """Call a deterministic function: compiled if `compiled` is set, and recomputed in the backward pass if
        `gradient_checkpointing` is."""
        compiled = compiles and self.compiled and self.training
        run: Callable[..., R] = partial(call_compiled, function) if compiled else function
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return run(*inputs)
        output: R = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return output

    @abstractmethod
    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        """Yield the predictions of each step at its `origins`. A generator, so that the logits of all steps never exist
        at once."""

    def prediction(
        self, hidden_MH: Tensor, lm_head_DH: Tensor, origin_M: Tensor, step: int, feature_ME: Tensor | None = None
    ) -> StepPrediction:
        teacher_M, target = origin_M + step + 1, (self.lm_bias_D, self.logit_transform)
        return StepPrediction(hidden_MH, lm_head_DH, teacher_M, origin_M, feature_ME, *target)

    # -- drafting ------------------------------------------------------------------------------------------------

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Return the session of a batch of prompts, given the target's states {layer: [B, T, E]}, padded on the
        right."""

    def read_text(self, session: Any, check: Callable[[], None] | None) -> None:
        """Read a long pending prompt piece by piece, calling `check` before each. A no-op if `prefill` has read it."""

    @abstractmethod
    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        """Return the logits [B, W, D] of the children of one level's nodes; [B, 1, D] if all nodes share them. A round
        calls it for one level after another.

        Args:
            tokens_BW: tokens of the level's nodes; level 0 is the root alone. Rows with fewer nodes are padded.
            parents_BW: index of each node's parent in the previous level, on the host; 0 at level 0.
            depth: the level, from 0 to `draft_steps` - 1.
        """

    def draft_tree(self, session: Any, root: int, request: Request, max_children: int) -> Tree | None:
        """Grow a single row's dynamic tree in one call, as `grow` of `headstart.drafters.heads` does level by level,
        with at most `max_children` per node and none sampled. None if unsupported."""
        return None

    @abstractmethod
    def commit(self, session: Any, committed: Committed) -> None:
        """Append the round's accepted tokens, root first, and their states."""

    @abstractmethod
    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows, in ascending order."""

    @abstractmethod
    def join(self, session: Any, other: Any) -> None:
        """Append the rows of another session, between two rounds."""

    @property
    def max_children(self) -> int:
        """Number of tokens that can be drafted after a node."""
        return self.config.draft_width

    def check_tree(self, shape: TreeShape) -> None:
        """Raise a UserError for a tree deeper than the heads or wider than their drafts."""
        remedy = "Tune the heads again (headstart tune), or export them with the tree that was tuned for them."
        if shape.depth > self.draft_steps:
            raise UserError(
                f"The tree is {shape.depth} deep and the heads draft {self.draft_steps} tokens ahead.", remedy
            )
        if shape.width > self.max_children:
            problem = f"The tree takes the top {shape.width} drafts of a node, but the heads draft {self.max_children}."
            raise UserError(problem, remedy)

    @torch.enable_grad()  # with gradients, products are torch's own and are counted
    def flops_per_draft(self) -> int:
        """Count the FLOPs per token of a chain of drafts, LM head included; a multiply-add is two. Excludes attention,
        which depends on the text and which torch counts on some devices only."""
        device, parent_11 = self.draft_to_target_D.device, torch.zeros(1, 1, dtype=torch.long)
        state_11E = torch.zeros(1, 1, self.config.hidden_size, dtype=self._dtype, device=device, requires_grad=True)
        root_11 = parent_11.to(device)

        def draft_chain() -> None:
            session = self.prefill([[0]], dict.fromkeys(self.aux_layers, state_11E))
            for depth in range(self.draft_steps):
                self.draft_step(session, root_11, parent_11, depth)

        draft_chain()  # warm-up: builds the rotary tables
        with FlopCounterMode(display=False) as counter:
            draft_chain()
        counts = counter.get_flop_counts()["Global"].items()
        return sum(int(count) for operation, count in counts if "attention" not in str(operation)) // self.draft_steps


class OneForwardHead(DraftHead):
    """Base class of families that draft all depths in one forward, independent of the path.

    A GPU computes all depths at once. A CPU computes them on demand, which skips unused LM heads.
    """

    @abstractmethod
    def depth_logits(self, session: Any, root_B: Tensor, depths: range) -> Tensor:
        """Return the logits [B, len(depths), D] at these depths (0 is the root's child). A round calls it for
        ascending depths, each once; the first call may cache shared results in `session`."""

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        return self.depth_logits(session, tokens_BW[:, 0], range(depth, depth + 1))


def supervised_origins(supervised_BT: Tensor, step: int) -> Tensor:
    """Return the flat indices b * T + t with tokens t + 1 .. t + step + 2 all supervised, as in decoding."""
    window = step + 2
    if supervised_BT.shape[1] <= window:
        return torch.zeros(0, dtype=torch.long, device=supervised_BT.device)
    valid_BT = torch.zeros_like(supervised_BT)
    stop = supervised_BT.shape[1] - window
    valid_BT[:, :stop] = supervised_BT.unfold(1, window, 1)[:, 1:].all(-1)
    return valid_BT.flatten().nonzero()[:, 0]


def origins(batch: HeadBatch, step: int) -> Tensor:
    """Return the `supervised_origins` of a batch that train this step, on the device of its tokens."""
    return upload(host_origins(batch, step), batch.tokens_BT.device)


def host_origins(batch: HeadBatch, step: int) -> Tensor:
    """Return `origins` on the host, ascending. Each step's origins are a subset of the step before."""
    origin_M = supervised_origins(batch.supervised_BT, step)
    if batch.subsampled_steps_BT is None:
        return origin_M
    return origin_M[batch.subsampled_steps_BT.flatten()[origin_M] > step]


_FAMILIES: dict[str, type[DraftHead]] = {}

H = TypeVar("H", bound=type[DraftHead])


def register(head: H) -> H:
    """Class decorator: register a family under the name in its config."""
    head.family = head.Config.model_fields["family"].default
    _FAMILIES[head.family] = head
    return head


def families() -> dict[str, type[DraftHead]]:
    """Return all families by name. Imports every module of this folder, so that a new file is enough."""
    package = importlib.import_module("headstart.heads")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"headstart.heads.{module.name}")
    return dict(_FAMILIES)


def family(name: str) -> type[DraftHead]:
    """Look up a family by name; a UserError suggests the nearest one."""
    known = families()
    if name not in known:
        raise UserError(f"Unknown head family {name!r}.", nearest(name, known))
    return known[name]


def family_of(published: Published) -> type[DraftHead]:
    """Look up the family of a published layout."""
    return next(family for family in families().values() if family.publishes is published.layout)


def parse_heads(settings: Any) -> HeadConfig:
    """Validate the settings of heads one by one; `HeadSettings.check` checks their combination."""
    if not isinstance(settings, Mapping):
        raise UserError(f"Recipe key 'heads' is {settings!r}.", "Write a family and its settings.")
    name = str(settings.get("family", ""))
    try:
        return family(name).Config.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        settable = {key for key, _, _ in section_fields(family(name).Config)}
        if first["type"] != "extra_forbidden" and not {*first["loc"][:1]} - settable:
            raise recipe_error(error, ("heads",), name) from None
        raise _not_of_this_family(str(first["loc"][-1]), name) from None


def _not_of_this_family(setting: str, name: str) -> UserError:
    """Return the error for an unknown setting, naming other families that have it."""
    known = {each: {key for key, _, _ in section_fields(head.Config)} for each, head in families().items()}
    elsewhere = close(setting, set().union(*known.values()))
    if close(setting, known[name]) or not elsewhere:
        remedy = nearest(setting, known[name])
    else:
        owners = " and ".join(sorted(other for other in known if elsewhere in known[other]))
        remedy = f"{elsewhere!r} is a setting of {owners}. {name} has: {', '.join(sorted(known[name]))}."
    return UserError(f"{name} heads have no setting {setting!r}.", remedy)


def make_config(settings: HeadSettings | Mapping[str, Any], target: FrozenModel) -> HeadConfig:
    """Complete recipe settings with the target's values."""
    given = settings if isinstance(settings, HeadConfig) else parse_heads(settings)
    from_recipe = given.to_recipe()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config = parse_heads({**given.of_target(target, from_recipe), **from_recipe, **sizes})
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"A draft vocabulary of {config.draft_vocab_size} is larger than the target's {target.vocab_size}.",
            "Lower heads.draft_vocab_size, or set it to 0 for the whole vocabulary.",
        )
    return config
