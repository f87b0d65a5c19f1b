"""The contracts that an MTP head may mean other than its spec states."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.chain_variants import attention_shifted, head_change, shared_variants, with_ids
from mlx_spec.drafters.mtp.head import MTPForward
from mlx_spec.drafters.mtp.spec import MTPSpec
from mlx_spec.drafters.variants import Variant, shifted
from mlx_spec.target import Target


def variants(drafter: ChainDrafter, target: Target) -> list[Variant]:
    """Return every contract that differs from a head's own in one point."""
    forward, layers = drafter.forward, target.num_layers
    assert isinstance(forward, MTPForward)
    spec = forward.spec
    stage, other = ("before", layers - 1) if spec.reads_normed else ("after", layers)
    side = "before" if spec.recycles_normed else "after"
    of_family = "model_type of config.json names a family whose heads are"
    found = [
        Variant(
            f"the hidden state {stage} the final norm",
            "hidden state",
            f"{of_family} fed {stage} the final norm",
            lambda d: d.changed(target_layer_ids=(other,)),
            at_load=True,
        ),
        Variant(
            "embedding and hidden state swapped",
            "order",
            f"exchange the halves of fc.weight, or {of_family} concatenated the other way",
            changed_spec(lambda s: replace(s, hidden_first=not s.hidden_first)),
            at_load=True,
        ),
        Variant(
            f"chains that go on with its output {side} the norm",
            "feedback",
            f"{of_family} recycled {side} their norm",
            changed_spec(lambda s: replace(s, recycles_normed=not s.recycles_normed)),
        ),
        Variant(
            "norms of embedding and hidden state exchanged",
            "input norms",
            "exchange pre_fc_norm_embedding.weight and pre_fc_norm_hidden.weight",
            head_change(lambda f: replace(f, norm_embedding=f.norm_hidden, norm_hidden=f.norm_embedding)),
        ),
    ]
    ids = drafter.head.ids
    if ids is not None:
        offset = mx.clip(ids + mx.arange(ids.size), 0, target.vocab_size - 1)
        fix = "d2t holds offsets: add 0, 1, 2, ... to them"
        found.append(Variant("d2t read as offsets", "vocabulary", fix, partial(with_ids, ids=offset)))
    if layers > 1:
        found.append(
            Variant(
                "the hidden state one layer lower",
                "hidden state",
                f"the target that it was trained with puts out the state of layer {layers - 2}",
                lambda d: d.changed(target_layer_ids=(layers - 2,)),
            )
        )
    return found + shared_variants(drafter, target, with_norms_shifted)


def changed_spec(change: Callable[[MTPSpec], MTPSpec]) -> Callable[[ChainDrafter], ChainDrafter]:
    """Return the change of a drafter that changes its head's spec."""
    return head_change(lambda forward: replace(forward, spec=change(forward.spec)))


def with_norms_shifted(forward: MTPForward, by: float) -> MTPForward:
    """Return a head whose norm weights are all larger by ``by``."""
    return replace(
        forward,
        norm_embedding=shifted(forward.norm_embedding, by),
        norm_hidden=shifted(forward.norm_hidden, by),
        input_norm=shifted(forward.input_norm, by),
        post_norm=shifted(forward.post_norm, by),
        norm=shifted(forward.norm, by),
        attention=attention_shifted(forward.attention, by),
    )
