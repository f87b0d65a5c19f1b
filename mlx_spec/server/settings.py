"""How a server was started: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What holds for all requests.

    model_id: the name of the model for clients; never a path.
    loaded_from: what the model was loaded by, a name or a path; no answer says it.
    aliases: other names that requests may give.
    drafter: the drafter's name for clients, empty without one.
    sampling: of requests that do not say; the names are those of Sampling.
    max_tokens: of such requests; None for what is left of the context.
    template: further arguments of the chat template.
    prefill_step_size: prompt tokens of a pass.
    keepalive_seconds: silence of a stream after which a comment is sent.
    api_key: that requests have to carry; None for none.
    hosts: names that requests may reach the server by, besides localhost and addresses.
    origins: of web pages that may use the server; "*" for all.
    max_body_bytes: of a request.
    """

    model_id: str
    loaded_from: str = ""
    aliases: tuple[str, ...] = ()
    drafter: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prefill_step_size: int = 512
    keepalive_seconds: float = 5.0
    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20

    def knows(self, model: str | None) -> bool:
        """Whether a request's model is this one."""
        return model is None or model in (self.model_id, *self.aliases)
