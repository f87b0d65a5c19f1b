"""What waits until a first text has come to its end, so that nobody waits for it."""

import logging
from collections.abc import Callable

from mlx_spec.errors import MlxSpecError

logger = logging.getLogger(__name__)


class AfterText:
    """Called when a text has come to its end: measures once what was put off, then does what is due each time."""

    def __init__(self) -> None:
        self.once: list[Callable[[], object]] = []
        self.always: list[Callable[[], object]] = []

    def __call__(self) -> None:
        """Run everything; what cannot be measured, for want of free pages for example, is left out."""
        while self.once:
            try:
                self.once.pop(0)()
            except MlxSpecError as error:
                logger.info("Not measured: %s", error)
        for each in self.always:
            each()
