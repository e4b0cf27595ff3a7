"""Kimi K3's text: Kimi Linear with a bank of residuals in place of one stream, and a layer that drafts tokens.

A layer's two parts read a mixture of the bank's rows and the running one (`residual_mix`); each `residual_size` layers
the running row goes to the bank and begins anew. What else differs (SiTU, experts of a smaller width, gates) a config
of Kimi Linear may have too, so one class reads both. Source: Kimi K3's config and weights' names; no released class.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tiercel.models.deepseek import latent_projections
from tiercel.models.fields import ConfigFields
from tiercel.models.kimi_config import read_kimi
from tiercel.models.kimi_linear import KimiLinear, Shapes
from tiercel.models.model import RecordOptions, TapStream
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

_RESIDUAL_PARTS = ("self_attention_res", "mlp_res")
_OUTER_FIELDS = (
    "vision_config",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
    "ignore_index",
)


class KimiK3(KimiLinear):
    """K3's text alone, whose config names itself Kimi Linear; without a residual bank it is that."""

    @property
    def tap_streams(self) -> tuple[TapStream, ...]:
        """With a bank there is no one residual stream, so a drafter says which of two it was trained on."""
        return ("prefix", "attn_res") if self.config.residual_size else super().tap_streams

    def expected_weights(self) -> Shapes:
        """Return the shape of every weight that the forward pass reads, by canonical name."""
        mixes = _mix_weights(f"{self.prefix}.output_attn_res", self.config.hidden_size)
        return super().expected_weights() | (mixes if self.config.residual_size else {})

    def weights_of_layer(self, i: int) -> Shapes:
        """Return the shapes of layer i's weights; the first mixes nothing before its attention."""
        shapes = super().weights_of_layer(i)
        if self.config.residual_size:
            for part in _RESIDUAL_PARTS if i else _RESIDUAL_PARTS[1:]:
                shapes |= _mix_weights(part, self.config.hidden_size)
        return shapes

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: besides Kimi Linear's, what the first layer would mix with."""
        return super().may_ignore(name) or name.startswith(f"{self.prefix}.layers.0.{_RESIDUAL_PARTS[0]}_")

    def forward(self, rec: Recorder, options: RecordOptions) -> Value:
        """Write one step in ops and return its logits."""
        c = self.config
        if not c.residual_size:
            return super().forward(rec, options)
        bank: list[Value] = []
        running = rec.embed(f"{self.prefix}.embed_tokens.weight")
        for i in range(c.n_layers):
            if options.tap_stream == "prefix":
                rec.tap(i - 1, running)
            bank, running = self._banked(rec, options, i, bank, running)
        x = self._mixed(rec, f"{self.prefix}.output_attn_res", bank, running)
        x = rec.keep_hidden(x) if rec.keeps_hidden else x
        return self.head(rec, self.norm(rec, options, x, f"{self.prefix}.norm.weight"))

    def _banked(
        self, rec: Recorder, options: RecordOptions, i: int, bank: list[Value], running: Value
    ) -> tuple[list[Value], Value]:
        """Write layer i and return the bank and the running row after it, of the rows that it passes on."""
        prefix = f"{self.prefix}.layers.{i}"
        h = self._mixed(rec, f"{prefix}.{_RESIDUAL_PARTS[0]}", bank, running)
        if options.tap_stream == "attn_res":
            rec.tap(i - 1, h)
        h = self.norm(rec, options, h, f"{prefix}.input_layernorm.weight")
        y = self.attention(rec, options, i, h, {})
        bank, running = [self.kept_rows(rec, i, row) for row in bank], self.kept_rows(rec, i, running)
        if i % self.config.residual_size:
            running = rec.add(running, y)
        else:
            bank, running = [*bank, running], y
        h = self._mixed(rec, f"{prefix}.{_RESIDUAL_PARTS[1]}", bank, running)
        h = self.norm(rec, options, h, f"{prefix}.post_attention_layernorm.weight")
        return bank, rec.add(running, self.mlp(rec, i, h))

    def _mixed(self, rec: Recorder, name: str, bank: list[Value], running: Value) -> Value:
        if not bank:
            return running
        return rec.residual_mix([*bank, running], f"{name}_norm.weight", f"{name}_proj.weight", self.config.eps)

    @property
    def n_mtp_modules(self) -> int:
        """Layers that draft, which are mixtures; one may be there though the config says none."""
        return 0 if self.config.mixture is None else max(1, self.config.n_mtp_modules)

    def mtp_module_weights(self, module: int) -> Shapes:
        """Return the shapes of a draft layer's weights; it has an embedding and a head of its own."""
        c = self.config
        assert c.mixture is not None, "a model without experts has no draft layer"
        norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
        shapes: Shapes = {f"{name}.weight": (c.hidden_size,) for name in norms}
        shapes["eh_proj.weight"] = (c.hidden_size, 2 * c.hidden_size)
        shapes |= self.latent_weights() | self.feed_forward_weights(c.mixture)
        shapes |= {f"{name}.weight": (c.vocab_size, c.hidden_size) for name in ("embed_tokens", "shared_head.head")}
        return {f"{self.prefix}.layers.{c.n_layers + module}.{name}": shape for name, shape in shapes.items()}

    def forward_mtp(self, rec: Recorder, options: RecordOptions, module: int) -> Value:
        """Write a draft layer: latent attention and a mixture around a plain stream, with no bank."""
        c, i = self.config, self.config.n_layers + module
        prefix = f"{self.prefix}.layers.{i}"
        assert c.mixture is not None, "a model without experts has no draft layer"

        def norm(x: Value, name: str) -> Value:
            return self.norm(rec, options, x, f"{prefix}.{name}.weight")

        token = norm(rec.embed(f"{prefix}.embed_tokens.weight", skips_first=True), "enorm")
        x = rec.linear(rec.join(token, norm(rec.given(c.hidden_size), "hnorm")), f"{prefix}.eh_proj.weight")
        h = norm(x, "input_layernorm")
        made = latent_projections(rec, c, f"{prefix}.self_attn", h)
        x = rec.add(x, self.attend(rec, f"{prefix}.self_attn", h, made, layer=i))
        y = self.sparse(rec, f"{prefix}.block_sparse_moe", c.mixture, norm(x, "post_attention_layernorm"))
        x = rec.keep_hidden(rec.add(x, y))
        return rec.linear(norm(x, "shared_head.norm"), f"{prefix}.shared_head.head.weight")


class KimiK3Multimodal(KimiK3):
    """The text part of a checkpoint that sees: its vision weights are left unread."""

    prefix: ClassVar[str] = "language_model.model"
    head_name: ClassVar[str] = "language_model.lm_head.weight"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the config's text part; see `Model.from_config`."""
        outer = ConfigFields(config)
        text = outer.raw("text_config")
        if not isinstance(text, Mapping):
            raise outer.broken("text_config", text, "an object")
        outer.raw("quantization_config")  # read where the tensors are, and refused there
        for name in _OUTER_FIELDS:
            outer.raw(name)
        found = cls(read_kimi(text, "KimiK3ForConditionalGeneration"))
        if outer.flag("tie_word_embeddings", default=found.config.is_tied) != found.config.is_tied:
            raise outer.broken("tie_word_embeddings", outer.raw("tie_word_embeddings"), "what text_config says")
        outer.finish()
        return found

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: what only images need, too."""
        return super().may_ignore(name) or name.startswith(("vision_tower.", "mm_projector."))


def _mix_weights(name: str, hidden: int) -> Shapes:
    return {f"{name}_norm.weight": (hidden,), f"{name}_proj.weight": (1, hidden)}
