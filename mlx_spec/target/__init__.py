"""The target model: its families, its pages, and the forward pass over rows."""

from mlx_spec.target.pages import PagePool as PagePool
from mlx_spec.target.pages import Sequence as Sequence
from mlx_spec.target.pages import rooms as rooms
from mlx_spec.target.target import Pass as Pass
from mlx_spec.target.target import Target as Target
