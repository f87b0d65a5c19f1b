"""The errors of this package, as a tree. Every message says what is needed, what was found and what to do.

MlxSpecError
├── ModelError            a model, drafter or tokenizer cannot be used
│   ├── DownloadError     it could not be fetched, or is not the expected file
│   ├── UnsupportedModel  its architecture is not supported
│   └── DrafterMismatch   the drafter was made for another target, or its checkpoint is incomplete
├── RequestError          a request cannot be served as asked
│   └── ContextFull       the sequence does not fit into the context or the page pool
├── PositionError         a cache or drafter was asked for a position it cannot reach
├── NonFiniteError        no token can be chosen: the target's logits hold NaN or infinity
└── DrafterFailure        a draft pass produced NaN or infinity; the engine goes on without drafts

ModelWarning, a UserWarning, says in one sentence what was found in a checkpoint that does not stop the load.
"""


class MlxSpecError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelError(MlxSpecError):
    """A model, drafter or tokenizer cannot be used."""


class DownloadError(ModelError):
    """A model could not be fetched, or is not the expected file."""


class UnsupportedModel(ModelError):
    """The architecture of a model is not supported."""


class DrafterMismatch(ModelError):
    """A drafter does not fit the target, or its checkpoint is incomplete."""


class RequestError(MlxSpecError):
    """A request cannot be served as asked."""


class ContextFull(RequestError):
    """A sequence does not fit into the context or the page pool."""


class PositionError(MlxSpecError):
    """A cache or drafter was asked for a position it cannot reach."""


class NonFiniteError(MlxSpecError):
    """No token can be chosen: the target's logits hold NaN or infinity."""


class DrafterFailure(MlxSpecError):
    """A draft pass produced NaN or infinity; the engine goes on without drafts."""


class ModelWarning(UserWarning):
    """Something in a checkpoint that its user should know, and that does not stop the load."""
