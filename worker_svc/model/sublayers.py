"""A layer as a whole: two sublayers around the mixed copies of the stream (model.md C.2)."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.kernels.ops import collapse_norm, expand, expand_collapse_norm, mix
from phalanx.kernels.reference.hyper import Mix, MixWeights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.layers import AttentionWeights, LayerWeights
from phalanx.worker_svc.model.moe import Experts, moe
from phalanx.worker_svc.model.step import LayerContext

Context = TypeVar("Context", bound=LayerContext)
Attend = Callable[[Context, AttentionWeights, int, Tensor], Tensor]


def run_layer(
    context: Context,
    attend: Attend[Context],
    weights: LayerWeights,
    experts: Experts,
    layer: int,
    h: Tensor,
    pre: Tensor,
) -> tuple[Tensor, Tensor]:
    """Both sublayers: the stream [P, n, D] and the weights [P, n] with which the next layer reads it.

    The attention reads the stream with the weights of the layer before, the experts with those that
    this layer's attention made.
    """
    config = context.config
    mixed = _mix(config, weights.attention_mix, h)
    x = attention_input(config, weights, h, pre)
    context.note("attn_in", layer, x)
    y = attend(context, weights.attention, layer, x)
    context.note("attn_out", layer, y)
    h, x = expand_collapse_norm(y, h, mixed, mixed.pre, weights.moe.norm, config.rms_norm_eps)
    mixed = _mix(config, weights.moe_mix, h)
    context.note("ffn_in", layer, x)
    y = moe(context, weights.moe, experts, layer, x)
    context.note("ffn_out", layer, y)
    h = expand(y, h, mixed)
    context.note("h_out", layer, h)
    context.note("pre_mix_out", layer, mixed.pre)
    return h, mixed.pre


def attention_input(config: ModelConfig, weights: LayerWeights, h: Tensor, pre: Tensor) -> Tensor:
    """What the attention reads of the stream [P, n, D]: bf16 values [P, D]."""
    return collapse_norm(h, pre, weights.attention.norm, config.rms_norm_eps)


def _mix(config: ModelConfig, weights: MixWeights, h: Tensor) -> Mix:
    return mix(
        h,
        weights,
        iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        eps=config.rms_norm_eps,
    )


def first_weights(h: Tensor) -> Tensor:
    """With what the first layer reads the stream [P, n, D]: its first copy alone, float32 [P, n]."""
    pre = torch.zeros(h.shape[:2], device=h.device)
    pre[:, 0] = 1
    return pre
