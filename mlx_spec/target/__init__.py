"""The target model: its families, its pages, and the forward pass over rows."""

from mlx_spec.target.pages import CachedSequence as CachedSequence
from mlx_spec.target.pages import PagePool as PagePool
from mlx_spec.target.pages import reserve_positions as reserve_positions
from mlx_spec.target.target import Pass as Pass
from mlx_spec.target.target import Target as Target
