"""What start-up sizing, the scheduler and the user may know about a model. Knows no config and no forward pass."""

import msgspec

from tiercel.ops.costs import kv_head_bytes, latent_row_bytes
from tiercel.ops.program import KvLayer, StateLayer


class ModelInfo(msgspec.Struct, frozen=True):
    """What start-up sizing, the scheduler and the user may know about a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_len_tokens: int
    n_parameters: int
    kv_layers: tuple[KvLayer, ...]
    state_layers: tuple[StateLayer, ...] = ()

    @property
    def n_layers(self) -> int:
        """Layers that keep keys and values."""
        return len(self.kv_layers)

    @property
    def next_layer(self) -> int:
        """Number of the first layer behind the model's last: a drafter's."""
        used = [*(layer.index for layer in self.kv_layers), *(layer.index for layer in self.state_layers)]
        return 1 + max(used, default=-1)

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of a layer; all layers have the same number."""
        return self.kv_layers[0].n_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head; the same in all layers."""
        return self.kv_layers[0].head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence's recurrent state takes, whatever its length."""
        return sum(layer.nbytes for layer in self.state_layers)

    def kv_bytes_per_token(self, kv_dtype: str = "float16") -> int:
        """Bytes that one token leaves in a pool of the given type."""
        return sum(
            latent_row_bytes(kv_dtype, layer.head_dim)
            if layer.latent_values
            else layer.n_kv_heads * kv_head_bytes(kv_dtype, layer.head_dim)
            for layer in self.kv_layers
        )

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The types of pool that can hold the model's keys and values: latent rows have no int8 form."""
        is_latent = any(layer.latent_values for layer in self.kv_layers)
        return ("float16", "float32") if is_latent else ("float16", "float32", "int8")
