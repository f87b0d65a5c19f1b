"""Operations of the draft and verify passes, one file each, each with a reference in mlx.core operations."""

from metal_kernels.attention_rows import Cached as Cached
from metal_kernels.attention_rows import attention_rows as attention_rows
from metal_kernels.dynamic_conv import dynamic_conv as dynamic_conv
from metal_kernels.linear_rows import linear_rows as linear_rows
from metal_kernels.moe_rows import moe_rows as moe_rows
from metal_kernels.topk_rows import topk_rows as topk_rows
