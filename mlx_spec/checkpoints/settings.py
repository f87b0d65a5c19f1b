"""Reading settings of a ``config.json`` by key and kind, so that a wrong value is refused where it is read."""

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

from mlx_spec.errors import ModelError, ModelWarning

# What transformers and its relatives write beside the settings of a forward pass.
HARMLESS = {
    *("architectures", "auto_map", "base_model_name_or_path", "model_type", "name_or_path", "license", "prefix"),
    *("dtype", "torch_dtype", "torchscript", "use_bfloat16", "quantization", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "tokenizer_class"),
    *("use_cache", "return_dict", "use_return_dict", "is_decoder", "is_encoder_decoder", "initializer_range"),
    *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
    *("speculators_model_type", "speculators_config"),
    *("pretraining_tp", "task_specific_params", "tie_word_embeddings", "mrope_section", "mrope_interleaved"),
}
# Of the vision part of a model, which text does not need.
VISION = {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
# Of training, of generation and of reports: they say nothing of a forward pass.
HARMLESS_PARTS = (
    "dropout",
    "loss",
    "version",
    "train",
    "_init",
    "init_",
    "output_attentions",
    "output_hidden_states",
)


# Of whole numbers: kernels count in 32 bits.
LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Settings:
    """The keys and values of a ``config.json``, or of an object in it. Null counts as missing.

    values: them.
    name: of the checkpoint, for messages.
    error: raised for a value that is missing or wrong.
    place: where they stand, for messages.
    read: the keys that were asked for, of this object and of all that belong to the same file.
    """

    values: Mapping[str, Any]
    name: str
    error: type[ModelError]
    place: str = "config.json"
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """Return a value as it is, or None."""
        self.read.add(key)
        return self.values.get(key)

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self.get(key) is not None

    def whole(self, key: str, missing: int | None = None, least: int = 0) -> int:
        """Return a whole number from ``least`` to what 32 bits hold."""
        value = self._given(key, missing)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_whole(value) or not least <= value <= LARGEST:
            most = f" and at most {LARGEST}" if is_whole(value) and value > LARGEST else ""
            raise self.refusal(key, f"a whole number of at least {least}{most}")
        return int(value)

    def count(self, key: str, missing: int | None = None) -> int:
        """Return a whole number above 0."""
        return self.whole(key, missing, least=1)

    def number(self, key: str, missing: float | None = None) -> float:
        """Return a finite number."""
        value = self._given(key, missing)
        if not is_number(value):
            raise self.refusal(key, "a number")
        return float(value)

    def positive(self, key: str, missing: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._given(key, missing)
        if not is_number(value) or value <= 0:
            raise self.refusal(key, "a number above 0")
        return float(value)

    def flag(self, key: str, missing: bool | None = None) -> bool:
        """Return true or false."""
        value = self._given(key, missing)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str, missing: str | None = None) -> str:
        """Return a text."""
        value = self._given(key, missing)
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def wholes(self, key: str) -> list[int]:
        """Return a list of whole numbers, of which some may be negative; empty where there is none."""
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(is_whole(item) for item in value)):
            raise self.refusal(key, "a list of whole numbers")
        return value or []

    def positives(self, key: str, length: int) -> list[float]:
        """Return a list of so many numbers above 0."""
        value = self._given(key, None)
        fits = isinstance(value, list) and len(value) == length
        if not fits or not all(is_number(item) and item > 0 for item in value):
            raise self.refusal(key, f"a list of {length} numbers above 0")
        return [float(item) for item in value]

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; one text counts as a list of it, and none as an empty one."""
        value = self.get(key)
        value = [value] if isinstance(value, str) else value
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.refusal(key, "a list of texts")
        return value or []

    def part(self, key: str, required: bool = False) -> "Settings":
        """Return the settings of an object; none where there is no such object, unless it is required."""
        value = self._given(key, None if required else {})
        if not isinstance(value, dict):
            raise self.refusal(key, "an object of settings")
        return replace(self, values=value, place=f"{key} of {self.place}")

    def over(self, other: "Settings") -> "Settings":
        """Return these settings, and those of another object where these have none, as if of its place."""
        own = {key: value for key, value in self.values.items() if value is not None}
        return replace(other, values={**other.values, **own})

    def refusal(self, key: str, needed: str) -> ModelError:
        """Return the error for a value that is not what it has to be."""
        found = shorten(repr(self.values.get(key)), 80, placeholder=" ...")
        return self.error(
            f"{self.name}: {key} in {self.place} is {found}, and must be {needed}; "
            "use the config.json that was published with the weights."
        )

    def missing(self, key: str) -> ModelError:
        """Return the error for a key that has to be there."""
        return self.error(
            f"{self.name}: {self.place} has no {key!r}, which is needed; "
            "use the config.json that was published with the weights."
        )

    def unread(self, harmless: Collection[str] = ()) -> list[str]:
        """Return the keys that nothing asked for, although they could change what is computed.

        Objects that were asked for are looked into.
        """
        found = set[str]()
        for key, value in self.values.items():
            if key in self.read:
                found |= set(replace(self, values=value).unread(harmless)) if isinstance(value, dict) else set()
            elif value and key not in harmless and not is_harmless(key):
                # Null, false, zero and what is empty switch nothing on.
                found.add(key)
        return sorted(found)

    def warn_of_unread(self, harmless: Collection[str] = ()) -> None:
        """Give a ModelWarning that names the keys that nothing asked for, if there are any."""
        if keys := self.unread(harmless):
            warnings.warn(
                f"{self.name}: {', '.join(keys)} in config.json is not known and not read; if the checkpoint "
                "computes something else with it, few drafts are accepted.",
                ModelWarning,
                stacklevel=2,
            )

    def _given(self, key: str, missing: Any) -> Any:
        value = self.get(key)
        if value is None and missing is None:
            raise self.missing(key)
        return missing if value is None else value


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; true and false are none."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_harmless(key: str) -> bool:
    """Whether a key says nothing of a forward pass, whatever its value is."""
    return key in HARMLESS or key.startswith("_") or any(part in key for part in HARMLESS_PARTS)
