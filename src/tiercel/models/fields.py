"""Reads a model's config dict so that no field is silently ignored: each is used, known as harmless, or refused.

A field that nothing reads and that is not in the harmless list may change the arithmetic, so `finish` refuses it,
unless its value says that it is off (null, false, zero or empty).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.base.errors import ModelFileError, UnsupportedModel

_MAX_SIZE = 1 << 31
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127

# What tools write into configs and what only training, generation or printing reads.
_HARMLESS = frozenset(
    """architectures model_type transformers_version torch_dtype dtype use_cache initializer_range initializer_factor
    attention_dropout hidden_dropout hidden_dropout_prob embd_pdrop resid_pdrop attn_pdrop classifier_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id mask_token_id cls_token_id decoder_start_token_id
    pad_token bos_token eos_token id2label label2id return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores problem_type chunk_size_feed_forward tokenizer_class task_specific_params
    finetuning_task gradient_checkpointing temperature top_k top_p typical_p do_sample max_length max_new_tokens
    min_length num_beams num_beam_groups num_return_sequences diversity_penalty repetition_penalty length_penalty
    early_stopping no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty is_decoder
    torchscript use_bfloat16 attn_implementation cache_implementation auto_map prefix model_max_length
    tokenizer_model_max_length is_llama_config unsloth_version unsloth_fixed transformers.js_config base_model_tp_plan
    base_model_pp_plan keys_to_ignore_at_inference name_or_path attention_probs_dropout_prob""".split()  # noqa: SIM905 - one name a line, quoted, would be 90 lines
)

Required = object()
"""As a default: the field must be in the config."""


class ConfigFields:
    """One config dict and the record of what was read of it. Owner: the reader of one model's config."""

    def __init__(self, config: Mapping[str, Any], where: str = "config") -> None:
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Tell whether the field is there and not null."""
        return self._config.get(name) is not None

    def raw(self, name: str) -> Any:
        """Return a field as it is, or None."""
        self._read.add(name)
        return self._config.get(name)

    def size(self, name: str, default: object = Required) -> int:
        """Return a positive integer.

        Raises:
            ModelFileError: it is missing without a default, or no positive integer below 2**31.
        """
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_SIZE:
            raise self.broken(name, value, "a positive integer")
        return value

    def real(self, name: str, default: object = Required) -> float:
        """Return a finite number.

        Raises:
            ModelFileError: it is missing without a default, or no finite number.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self.broken(name, value, "a finite number")
        return float(value)

    def positive(self, name: str, default: object = Required) -> float:
        """Return a number above zero.

        Raises:
            ModelFileError: it is missing without a default, or is not that.
        """
        value = self.real(name, default)
        if value <= 0.0:
            raise self.broken(name, value, "a number above 0")
        return value

    def float32(self, name: str, default: object = Required) -> float:
        """Return a number that float32 arithmetic can add to others: above zero and below its largest.

        Raises:
            ModelFileError: it is missing without a default, or is not that.
        """
        value = self.positive(name, default)
        if value > _FLOAT32_MAX:
            raise self.broken(name, value, f"a number up to {_FLOAT32_MAX:.4g}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean.

        Raises:
            ModelFileError: it is no boolean.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.broken(name, value, "true or false")
        return value

    def words(self, name: str, n: int) -> Sequence[str] | None:
        """Return a list of `n` strings, or None when the field is absent or null.

        Raises:
            ModelFileError: it is something else.
        """
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != n or not all(isinstance(v, str) for v in value):
            raise self.broken(name, value, f"a list of {n} strings")
        return list(value)

    def indices(self, name: str) -> frozenset[int]:
        """Return a list of integers >= 0 as a set; empty when the field is absent or null.

        Raises:
            ModelFileError: it is something else.
        """
        value = self.raw(name)
        found = [] if value is None else value
        if not isinstance(found, list | tuple) or any(
            isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in found
        ):
            raise self.broken(name, value, "a list of integers >= 0")
        return frozenset(found)

    def only(self, name: str, *allowed: object, why: str) -> None:
        """Accept an absent or null field, or one of the values whose arithmetic is implemented.

        Raises:
            UnsupportedModel: the field has another value.
        """
        value = self.raw(name)
        if value is not None and not any(value is a or (value == a and type(value) is type(a)) for a in allowed):
            raise self.refused(name, value, why)

    def broken(self, name: str, value: object, needed: str) -> ModelFileError:
        """Return the error for a value that makes no sense."""
        return ModelFileError(f"{self._where}: {name} is {_short(value)}; {needed} is needed; check the model's files")

    def refused(self, name: str, value: object, why: str) -> UnsupportedModel:
        """Return the error for a value that makes sense and is not implemented."""
        return UnsupportedModel(f"{self._where}: {name} is {_short(value)}, which is not implemented: {why}")

    def finish(self) -> None:
        """Refuse the first field that was not read, is not harmless, and is not off.

        Raises:
            UnsupportedModel: there is one.
        """
        for name, value in self._config.items():
            known = name in self._read or name in _HARMLESS or name.startswith("_")
            if not known and value is not None and value is not False and value not in (0, 0.0, "", [], {}):
                why = "the field is unknown and may change the arithmetic; remove it if it does not"
                raise self.refused(name, value, why)

    def _value(self, name: str, default: object) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is Required:
            raise ModelFileError(f"{self._where}: {name} is missing; the model cannot be built without it")
        return default


def in_one_dialect(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a config with its fields under one name each; `aliases` are other names, and which name they stand for.

    Raises:
        ModelFileError: it says a thing twice, and not alike.
    """
    found = dict(config)
    for alias, name in aliases.items():
        value = found.pop(alias, None)
        if value is None:
            continue
        if found.get(name) is not None and found[name] != value:
            raise ConfigFields(config).broken(alias, value, f"{name} {found[name]}, which is the same field,")
        found[name] = value
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
