"""The target as training sees it: sizes, the few of its weights that a drafter shares or starts from, and a digest."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import UnsupportedModel
from tiercel.train.shape import DraftShape, Kind

if TYPE_CHECKING:
    from tiercel.boot.plan import Plan

Floats = npt.NDArray[np.float32]

_HEAD_DIM = 64  # of a drafter whose target's heads it cannot have
_LAYER_NAMES = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """What a person chooses of a drafter's size. `taps` empty: those the facts of the field advise."""

    kind: Kind
    n_layers: int
    n_slots: int
    rank: int
    topk: int
    draft_vocab: int
    taps: tuple[int, ...] = ()


class Target:
    """What training needs of a planned target. Reads weights when they are asked for."""

    def __init__(self, plan: "Plan") -> None:
        """Look at the target.

        Raises: UnsupportedModel: it has no residual stream to tap, or no head to share.
        """
        if plan.pooling is not None:
            raise UnsupportedModel("train: a pooling model generates nothing; choose a model that does")
        self._plan = plan
        plan.model.check_taps((0,))
        self._embedding, self._head = plan.model.ends()
        self.name = plan.resolved.display_name
        self.identity = plan.identity
        self.n_layers = plan.model.n_tap_layers
        self.vocab = plan.info.vocab_size
        self.hidden = plan.info.hidden_size

    def embedding(self) -> Floats:
        """Return the embedding, [V, E]."""
        return self._plan.checkpoint.tensors[self._embedding].float32()

    def head(self) -> Floats:
        """Return the head's matrix, [V, E]."""
        return self._plan.checkpoint.tensors[self._head].float32()

    @property
    def softcap(self) -> float:
        """What logits are bounded by; 0: by nothing."""
        return float(getattr(getattr(self._plan.model, "config", None), "final_softcap", 0.0))

    def final_norm(self) -> Floats:
        """Return the factors of the last norm, [E]; ones if it has another name than most."""
        return self._norm("model.norm.weight")

    def default_taps(self, kind: Kind) -> tuple[int, ...]:
        """Return which layers to tap: from the second to the fourth last, evenly; of EAGLE-3, three."""
        n = self.n_layers
        found = {2, n // 2, n - 3} if kind == "eagle3" else {round(1 + i * (n - 4) / 4) for i in range(5)}
        return tuple(sorted(i for i in found if 0 <= i < n - 1)) or (0,)

    def shape(self, sizes: DraftSizes, embedding_scale: float) -> DraftShape:
        """Return the drafter's whole shape: the target's own layer where it has a plain one.

        Raises: UnsupportedModel: a tap is none of the target's.
        """
        taps = sizes.taps or self.default_taps(sizes.kind)
        self._plan.model.check_taps(taps)
        layer = {name: tensor.shape for name, tensor in self._layer_tensors(self.n_layers - 1).items()}
        config = getattr(self._plan.model, "config", None)
        head_dim = int(getattr(config, "head_dim", _HEAD_DIM)) if layer else _HEAD_DIM
        n_heads = layer["self_attn.q_proj"][0] // head_dim if layer else max(1, self.hidden // head_dim)
        n_kv_heads = layer["self_attn.k_proj"][0] // head_dim if layer else n_heads
        ffn = layer["mlp.gate_proj"][0] if layer else -(-8 * self.hidden // (3 * 64)) * 64
        return DraftShape(
            kind=sizes.kind,
            vocab=self.vocab,
            draft_vocab=sizes.draft_vocab,
            hidden=self.hidden,
            ffn=ffn,
            n_layers=sizes.n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            eps=float(getattr(config, "eps", 1e-6)),
            act=str(getattr(config, "act", "silu")),
            rope_theta=self._rope_theta(config),
            max_position=self._plan.info.max_len_tokens,
            taps=taps,
            n_slots=sizes.n_slots,
            rank=sizes.rank,
            topk=sizes.topk,
            embedding_scale=embedding_scale,
        )

    def layer(self, i: int) -> dict[str, Floats] | None:
        """Return layer i's weights with its norms folded into what reads them; None if it is no plain layer.

        Names are those of a drafter's layer; norms are then ones.
        """
        tensors = self._layer_tensors(i)
        if not tensors:
            return None
        prefix = f"model.layers.{i}"
        before, between = (
            self._norm(f"{prefix}.{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")
        )
        found = {f"{name}.weight": tensors[name].float32() for name in _LAYER_NAMES if not name.endswith("layernorm")}
        for name in ("q_proj", "k_proj", "v_proj"):
            found[f"self_attn.{name}.weight"] *= before
        for name in ("gate_proj", "up_proj"):
            found[f"mlp.{name}.weight"] *= between
        return found | {
            f"{name}.weight": np.ones(self.hidden, np.float32) for name in _LAYER_NAMES if name.endswith("layernorm")
        }

    def _layer_tensors(self, i: int):  # type: ignore[no-untyped-def]
        tensors, prefix = self._plan.checkpoint.tensors, f"model.layers.{i}"
        expected = self._plan.model.expected_weights()
        found = {
            name: tensors[f"{prefix}.{name}.weight"] for name in _LAYER_NAMES if f"{prefix}.{name}.weight" in expected
        }
        has_more = any(
            name.startswith(f"{prefix}.")
            and name.removeprefix(f"{prefix}.").removesuffix(".weight") not in _LAYER_NAMES
            for name in expected
        )
        return {} if has_more or len(found) < len(_LAYER_NAMES) else found

    def _norm(self, name: str) -> Floats:
        if name not in self._plan.model.expected_weights():
            return np.ones(self.hidden, np.float32)
        weight = self._plan.checkpoint.tensors[name].float32()
        adds_one = self._plan.model.norms_add_one and not self._plan.checkpoint.norm_weights_include_one
        return weight + np.float32(1.0) if adds_one else weight

    @staticmethod
    def _rope_theta(config: object) -> float:
        ropes = getattr(config, "ropes", None) or {}
        names = [name for name in getattr(config, "layer_ropes", ()) if name is not None]
        return float(ropes[names[-1]].theta) if names else 10_000.0
