"""The DFlash 2 drafter (DFlash 1 included): a whole block of tokens in one pass.

Sources: Z Lab's ``dflash`` 0.1.0 and its published checkpoints.
"""

from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from metal_kernels import Cached, attention_rows, topk_rows
from mlx_spec.config_file import read_config as read_config_file
from mlx_spec.drafters.base import Choose, Committed, Proposal
from mlx_spec.drafters.checkpoint import load_tensors, read_tensors
from mlx_spec.drafters.context import PAGE_SLOTS, ContextKV
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config, read_config
from mlx_spec.drafters.dflash2.context import ContextWriter
from mlx_spec.drafters.dflash2.selector import gather_candidates, walk
from mlx_spec.errors import DrafterMismatch, RequestError
from mlx_spec.target import Target

# Tensors that the speculators layout may carry although they are the target's own.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


class DFlash2Drafter:
    """Drafts with a block forward over mask tokens, then a walk through the best candidates of each row."""

    name = "dflash2"

    def __init__(self, config: DFlash2Config, model: DraftModel, target: Target) -> None:
        """Bind a loaded model to the target whose embedding and output head it uses."""
        self.config = config
        self.model = model
        self.taps = config.target_layer_ids
        self.max_draft = config.block_size - 1
        self.walk = walk
        self.writer = ContextWriter(model)
        self.mask = target.embed(mx.array([config.mask_token_id]))
        self._embed = target.embed
        self._ids = None if config.draft_token_ids is None else mx.array(config.draft_token_ids)
        shape = (1, PAGE_SLOTS, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        nothing = mx.zeros((1, 1), dtype=mx.int32), mx.zeros((1,), dtype=mx.int32)
        self._no_context = mx.zeros(shape, dtype=target.dtype), *nothing
        self._head = target.logits if self._ids is None else target.head_for(self._ids)

    def open(self) -> ContextKV:
        """Return the state for an empty sequence."""
        return ContextKV(self.config.context_window)

    def extend(self, state: ContextKV, rows: Committed) -> None:
        """Write context keys and values of committed rows. Raises PositionError for a gap or an overlap."""
        self.writer.write(state, rows.position, rows.taps)
        # Otherwise the features of a long prompt would be held until the first draft.
        mx.async_eval(state.rows)

    def propose(self, state: ContextKV, anchor: int, count: int, choose: Choose) -> Proposal:
        """Draft the ``count`` tokens behind the anchor, which stands at the context's cursor."""
        if not 1 <= count <= self.max_draft:
            raise RequestError(f"This drafter drafts 1 to {self.max_draft} tokens a round, not {count}.")
        hidden = self.block(state, anchor, count + 1)[1:]
        logits = self._head(hidden)
        unary, ids, finite_logits = topk_rows(logits, self.config.selector_top_k)
        ids = ids if self._ids is None else self._ids[ids]
        selector = self.model.get("candidate_selector")
        candidates = gather_candidates(selector, hidden, ids, self._transform(unary))
        tokens, probabilities = self.walk(selector, candidates, anchor, state.cursor, choose)
        finite = {"block forward": mx.all(mx.isfinite(hidden)), "draft logits": finite_logits}
        if selector is not None:
            finite["candidate selector"] = mx.all(mx.isfinite(candidates.gates))
        return Proposal(tokens, candidates.ids, probabilities, finite)

    def rewind(self, state: ContextKV, position: int) -> int:
        """Forget context from ``position`` on; ahead of the cursor there is nothing to forget."""
        state.rewind(position)
        return state.cursor

    def block(self, state: ContextKV, anchor: int, rows: int) -> mx.array:
        """Run the block forward: final-normed hidden states [rows, H], the anchor's first."""
        embedded = mx.concatenate([self._embed(mx.array([anchor])), *[self.mask] * (rows - 1)])
        scale = self.config.input_embedding_scale
        x = embedded if scale == 1.0 else embedded * scale

        pool, pages, length = state.pages() if state.cursor > state.base else self._no_context
        cached = Cached(pages, length, (rows,))

        def attend(layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            return attention_rows(
                queries[0],
                keys[0],
                values[0],
                pool,
                layer,
                cached,
                scale=self.config.head_dim**-0.5,
                window=self.config.windows[layer],
                block=not self.config.causal[layer],
                slot_major=True,
            )[None]

        return self.model(x[None], state.cursor, attend)[0]

    def _transform(self, unary: mx.array) -> mx.array:
        unary = unary * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return unary if cap is None else mx.tanh(unary / cap) * cap


def load_dflash2(folder: Path, target: Target, name: str, unpack: bool = False) -> DFlash2Drafter:
    """Load a DFlash or DFlash 2 checkpoint and bind it to its target.

    ``unpack`` turns quantised weights into bfloat16 ones, which are faster on a CPU.
    Raises DrafterMismatch when the checkpoint is incomplete or was made for another target.
    """
    raw = read_config_file(folder, name, "drafter", DrafterMismatch)
    config = read_config(raw, name)
    check_target(config, target, name)
    model = DraftModel(config)
    load_tensors(model, native_names(read_tensors(folder, name), "speculators_model_type" in raw), name)
    if unpack:
        dequantize_model(model)
    return DFlash2Drafter(config, model, target)


def native_names(tensors: dict[str, mx.array], from_speculators: bool = False) -> dict[str, mx.array]:
    """Rename tensors of every known layout to the native one, and name codebooks as the modules do."""
    renamed = {}
    for name, value in tensors.items():
        if from_speculators and name in TARGET_TENSORS:
            continue
        name = name.removeprefix("model.")
        for old, new in (
            ("midlayer.", "layers.0."),
            ("encoder.fc.", "fc."),
            ("encoder.output_norm_enc.", "hidden_norm."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[f"{name}.weight" if name.endswith("_codebook") else name] = value
    return renamed


def check_target(config: DFlash2Config, target: Target, name: str) -> None:
    """Raise DrafterMismatch, with both numbers, when a drafter was made for another target."""
    for what, needed, found in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if needed is not None and needed != found:
            raise DrafterMismatch(
                f"{name} expects {what} {needed}; target {target.name} has {found}. "
                "Use a drafter trained for this target."
            )
    for what, ids, limit in (
        ("target_layer_ids", config.target_layer_ids, target.num_layers),
        ("mask_token_id", [config.mask_token_id], target.vocab_size),
        ("draft_token_ids", config.draft_token_ids or [], target.vocab_size),
    ):
        wrong = [i for i in ids if not 0 <= i < limit]
        if wrong:
            raise DrafterMismatch(f"{name}: {what} must lie in 0 .. {limit - 1}, found {wrong[:4]}.")
    if config.draft_token_ids and len(config.draft_token_ids) < config.selector_top_k:
        raise DrafterMismatch(
            f"{name}: draft_token_ids has {len(config.draft_token_ids)} ids, fewer than selector_top_k "
            f"{config.selector_top_k}."
        )
    if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
        raise DrafterMismatch(
            f"{name}: hidden size {config.hidden_size} is no multiple of conv_group_size {config.conv_group_size}."
        )
