"""Operations of the draft and verify passes on arrays, each with a reference in mlx.core operations.

``x.py`` holds an operation, ``x.metal`` beside it the kernel's text, ``_x.h`` what several texts include, ``cpu/``
the C text for CPUs.
``launching`` runs the texts, ``checks`` compares them with their references on this machine.
"""

from metal_kernels.accept_rows import accept_rows as accept_rows
from metal_kernels.argmax_rows import argmax_rows as argmax_rows
from metal_kernels.attention_rows import Cached as Cached
from metal_kernels.attention_rows import attention_rows as attention_rows
from metal_kernels.attention_rows import joined_heads as joined_heads
from metal_kernels.causal_conv_rows import Heads as Heads
from metal_kernels.causal_conv_rows import causal_conv_advance as causal_conv_advance
from metal_kernels.causal_conv_rows import causal_conv_replay as causal_conv_replay
from metal_kernels.dynamic_conv import dynamic_conv as dynamic_conv
from metal_kernels.gated_delta_rows import DeltaInputs as DeltaInputs
from metal_kernels.gated_delta_rows import Gates as Gates
from metal_kernels.gated_delta_rows import gated_delta_advance as gated_delta_advance
from metal_kernels.gated_delta_rows import gated_delta_replay as gated_delta_replay
from metal_kernels.launching.constants import ints as ints
from metal_kernels.launching.constants import resident as resident
from metal_kernels.launching.implementations import is_traceable as is_traceable
from metal_kernels.limits import MAX_VERIFY_ROWS as MAX_VERIFY_ROWS
from metal_kernels.linear import Linear as Linear
from metal_kernels.linear import Quantization as Quantization
from metal_kernels.linear_rows import linear_rows as linear_rows
from metal_kernels.logprob_rows import logprob_rows as logprob_rows
from metal_kernels.mask_rows import mask_rows as mask_rows
from metal_kernels.moe_rows import Experts as Experts
from metal_kernels.moe_rows import moe_rows as moe_rows
from metal_kernels.norm_rope import context_kv as context_kv
from metal_kernels.norm_rope import kv_sides as kv_sides
from metal_kernels.norm_rope import qkv_norm_rope as qkv_norm_rope
from metal_kernels.rms_norm_rows import rms_norm_rows as rms_norm_rows
from metal_kernels.rope import Rope as Rope
from metal_kernels.row_spans import RowSpans as RowSpans
from metal_kernels.stack_rows import stack_rows as stack_rows
from metal_kernels.topk_rows import topk_rows as topk_rows
from metal_kernels.walk_rows import walk_rows as walk_rows
