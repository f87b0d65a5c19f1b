"""Memory: what a loaded model takes, how large its cache may become, and whether that fits into the machine."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.engine import Engine
from mlx_spec.errors import RequestError
from mlx_spec.loading.weights import memory_bytes
from mlx_spec.target.pages import PAGE_SLOTS

# Contexts that the cache of several requests may hold where memory allows it.
MAX_CONTEXTS = 16
# Of the memory that weights leave, what the cache may take where nobody says; the rest is for passes and others.
SHARE = 0.5


@dataclass(frozen=True)
class Memory:
    """Bytes, and positions.

    model: of all that is loaded, the drafter included.
    cache: of the cache when it is full.
    positions: that the cache then holds.
    limit: what the machine gives to a model.
    """

    model: int
    cache: int
    positions: int
    limit: int

    def __str__(self) -> str:
        return (
            f"model and drafter {self.model / 1e9:.2f} GB, cache up to {self.positions} positions in "
            f"{self.cache / 1e9:.2f} GB, of {self.limit / 1e9:.1f} GB"
        )


def fit_cache(engine: Engine, wanted: int | None, limit: int | None = None) -> Memory:
    """Bound the pages of an engine by what the machine has, and return what it takes.

    wanted: positions that were asked for; None for as many as fit.
    limit: bytes that the machine gives to a model; by default what MLX recommends, or most of the memory.
    Raises RequestError for a cache that does not fit.
    """
    limit = memory_limit() if limit is None else limit
    pool, model = engine.target.pool, mx.get_active_memory()
    left = max(0, limit - model)
    if wanted is not None:
        needed = pool.max_pages * pool.page_bytes
        if needed > left:
            fits = left // pool.page_bytes * PAGE_SLOTS
            raise RequestError(
                f"A cache of {wanted} positions takes {needed / 1e9:.1f} GB, but beside the model's "
                f"{model / 1e9:.1f} GB this machine has {left / 1e9:.1f}: give --max-kv-size {fits} or less."
            )
    else:
        context = -(-engine.target.context // PAGE_SLOTS)
        pool.max_pages = max(1, min(MAX_CONTEXTS * context, int(left * SHARE) // pool.page_bytes))
    return Memory(model, pool.max_pages * pool.page_bytes, pool.max_pages * PAGE_SLOTS, limit)


def memory_limit() -> int:
    """Return how many bytes the machine gives to a model."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return memory_bytes() * 3 // 4
