"""A config.json, read so that nothing in it is passed over in silence."""

from collections.abc import Mapping
from typing import Any

from affinage.errors import UserError

# What changes neither logits nor gradients: names, versions, ids for tokenizers, how transformers computes, and keys
# that configurations of other tasks leave behind.
_NO_EFFECT = {
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation", "name_or_path",
    "task_specific_params", "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict",
    "id2label", "label2id", "problem_type", "is_encoder_decoder", "max_window_layers",
}  # fmt: skip


class HfConfig:
    """The values of a config.json. Every one must be asked for, or be known to have no effect."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._left = dict.fromkeys(key for key in values if key not in _NO_EFFECT)
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or what transformers takes where it is absent."""
        self._left.pop(key, None)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise UserError(f"`{key}` is missing", where=self.where)
        return value

    def expect(self, key: str, *honoured: Any, default: Any = None) -> None:
        """Refuse every value but those that the graph computes with anyway."""
        value = self.get(key, default)
        if value not in honoured:
            raise self.refused(key, value)

    def refused(self, key: str, value: Any) -> UserError:
        """The message for a value that cannot be honoured."""
        return UserError(f"`{key}: {value}` cannot be honoured, so this model is not imported", where=self.where)

    def finish(self) -> None:
        """Refuse keys that nobody has asked for, unless they are null."""
        unknown = [key for key in self._left if self._values[key] is not None]
        if unknown:
            listed = ", ".join(f"`{key}: {self._values[key]}`" for key in unknown)
            raise UserError(f"it is not known what these do, so this model is not imported: {listed}", where=self.where)
