"""What all bodies of requests share: null is absent, an unknown name is refused, numbers are numbers."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from mlx_spec.decoding.logprobs import MAX_TOP_LOGPROBS
from mlx_spec.server.errors import bad_request
from mlx_spec.server.tools import Message, Tool

Json = dict[str, Any]


def messages_of(*roles: str) -> Any:
    """Return the type of messages from these roles: read by hand, for errors that name the place."""
    message = {
        "type": "object",
        "properties": {"role": {"enum": roles}, "content": {"anyOf": [{"type": "string"}, {"type": "array"}]}},
        "required": ["role", "content"],
    }
    schema = {"type": "array", "minItems": 1, "items": message}
    return Annotated[list[Json], Field(min_length=1), WithJsonSchema(schema)]


Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Texts = Annotated[int, Field(ge=1, le=16)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
NumDraftTokens = Annotated[int, Field(ge=0)] | Literal["adaptive"]
Stop = str | Annotated[list[str], Field(max_length=16)]
MAX_BIAS = 100
# Efforts that ask for no reasoning at all.
NO_EFFORT = ("none", "minimal")
MARKERS = {"type", "text", "cache_control", "annotations", "citations", "prompt_cache_breakpoint"}


def with_nulls(schema: Json) -> None:
    """Say in the description of a body that null is absent."""
    for name, described in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in described.get("anyOf", ()):
            kept = {key: described.pop(key) for key in ("title", "default") if key in described}
            schema["properties"][name] = {"anyOf": [described, {"type": "null"}], **kept}


class Body(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=with_nulls)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """Take null for absent."""
        return (
            {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given
        )


class Sampled(Body):
    """The options that mlx-lm's server has and others do not, for every interface."""

    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repetition_context_size: Count | None = None
    presence_context_size: Count | None = None
    frequency_context_size: Count | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    num_draft_tokens: NumDraftTokens | None = None
    draft: bool | None = None

    def drafts(self) -> int | Literal["adaptive"] | None:
        """Return how many tokens to draft a round."""
        return 0 if self.draft is False else self.num_draft_tokens

    def sampling(self) -> dict[str, Any]:
        """Return the settings that are given, by the names of Sampling."""
        names = {
            "temperature": "temp",
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "repetition_penalty": "repetition_penalty",
            "repetition_context_size": "repetition_context_size",
            "presence_penalty": "presence_penalty",
            "presence_context_size": "presence_context_size",
            "frequency_penalty": "frequency_penalty",
            "frequency_context_size": "frequency_context_size",
            "xtc_probability": "xtc_probability",
            "xtc_threshold": "xtc_threshold",
        }
        found = {
            ours: value for theirs, ours in names.items() if (value := getattr(self, theirs, None)) is not None
        }
        if self.seed is not None:
            found["seed"] = self.seed % 2**63
        return found


def bias_of(given: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a bias of token ids as a setting. Raises ApiError."""
    if not given:
        return {}
    try:
        found = {int(token): bias for token, bias in given.items()}
    except ValueError:
        found = {}
    if not found or any(abs(bias) > MAX_BIAS for bias in found.values()):
        raise bad_request(f"logit_bias maps token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}.", "logit_bias")
    return {"logit_bias": found}


def stops(given: str | Sequence[str] | None, param: str = "stop") -> list[str]:
    """Return stop strings. Raises ApiError for empty ones."""
    found = [given] if isinstance(given, str) else list(given or ())
    if any(not each for each in found):
        raise bad_request(f"{param} takes strings of at least one character.", param)
    return found


def with_effort(template: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return arguments of the chat template for an effort of reasoning; what the client gives itself wins."""
    found: dict[str, Any] = {}
    if effort is not None:
        found = {"enable_thinking": effort not in NO_EFFORT, "reasoning_effort": effort}
    return {**found, **(template or {})}


def only_false(value: bool | None, param: str, reason: str) -> None:
    """Raise ApiError for an option that can only be off."""
    if value:
        raise bad_request(f"{param} cannot be true: {reason}.", param)


def text_of(content: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content, a string or parts. Raises ApiError for images and other kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{param} takes text or a list of text parts.", param)
    texts = []
    for index, part in enumerate(content):
        place = f"{param}.{index}"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise bad_request(f"{place} is of type {kind!r}; this model reads {' and '.join(kinds)} alone.", place)
        require_keys(part, MARKERS, place)
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{place}.text must be a string.", f"{place}.text")
        texts.append(part["text"])
    return "".join(texts)


def require_keys(given: Mapping[str, Any], known: set[str], param: str) -> None:
    """Raise ApiError for a name that is not known and has a value."""
    for name, value in given.items():
        if name not in known and value not in (None, [], {}):
            raise bad_request(f"{param}.{name} is not known here.", f"{param}.{name}")


def json_object(text: Any, param: str) -> dict[str, Any]:
    """Return an object that is given as JSON text or as itself. Raises ApiError."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise bad_request(f"{param} must be a JSON object.", param)


def function_tool(given: Mapping[str, Any], param: str) -> Tool:
    """Return a tool in OpenAI's form from its function. Raises ApiError."""
    name, parameters = given.get("name"), given.get("parameters")
    if not isinstance(name, str) or not name:
        raise bad_request(f"{param}.name must be a string.", f"{param}.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_request(f"{param}.parameters must be a JSON schema.", f"{param}.parameters")
    if not isinstance(given.get("description", ""), str | None):
        raise bad_request(f"{param}.description must be a string.", f"{param}.description")
    if not isinstance(given.get("strict"), bool | None):
        raise bad_request(f"{param}.strict must be true or false.", f"{param}.strict")
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: given[key] for key in keys if given.get(key) is not None}}


def choice_of_tools(choice: str | None, name: Any, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return which tools are to be called, for ChatRequest. Raises ApiError.

    choice: "auto", "none" or "required"; None where one tool has a name.
    """
    if choice == "required" and not tools:
        raise bad_request("tool_choice is required, but there are no tools.", "tool_choice")
    if choice is None and name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
    return {"tool_choice": choice or "required", "only_tool": name if choice is None else None}


def data(value: Json) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def require_messages(messages: Sequence[Message], param: str) -> list[Message]:
    """Return messages. Raises ApiError for none."""
    if not messages:
        raise bad_request(f"{param} is empty: at least one message is needed.", param)
    return list(messages)
