"""The compressor: pools the tokens of a group into one latent row, across step borders."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.backends.reference.norm import rms_norm
from dsv41.hal.types import LayerState, StepPlan


def compress(hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
    """The latent `[T, D]` of the group that each token closes, normed and not rotated, in `hidden`'s dtype.

    Rows of tokens that close no group hold something or other; `plan.compressed_slots` tells which. Updates the
    layer's compressor state with the raw rows of this step.
    """
    weights = layer.weights.compressor
    assert weights is not None
    if weights.wgate is None:
        pooled = F.linear(hidden, weights.wkv.to(hidden.dtype))
    else:
        pooled = _pool(_raw_rows(hidden, weights.wkv, weights.wgate), layer, plan).to(hidden.dtype)
    return rms_norm(pooled, weights.norm, layer.spec.eps)


def _raw_rows(hidden: Tensor, wkv: Tensor, wgate: Tensor) -> Tensor:
    """Values and gates `[T, 2, D]` in fp32."""
    wide = hidden.float()
    return torch.stack((F.linear(wide, wkv.float()), F.linear(wide, wgate.float())), dim=1)


def _pool(raw: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
    """Softmax per channel over the gates of a group, applied to its values: `[T, D]` fp32."""
    assert layer.caches is not None and layer.caches.compressor_state is not None
    state = layer.caches.compressor_state
    batch, ratio = plan.batch, layer.spec.ratio
    if batch.num_requests == 0:
        return raw[:, 0]  # padding alone
    ring = state.shape[1]
    live = plan.token_request >= 0
    request = plan.token_request.clamp(min=0)
    slot = batch.state_slots[request]
    position = batch.positions
    token = torch.arange(raw.shape[0], device=raw.device)
    first = batch.query_start_loc.long()[request]

    group = [raw]
    for back in range(1, ratio):
        earlier = (token - back).clamp(min=0)
        # Padding may stand before a request's first token, so the row before is not always the token before.
        in_step = (token - back >= first) & (position[earlier] == position - back)
        held = state[slot, (position - back) % ring]
        group.append(torch.where(in_step[:, None, None], raw[earlier], held))
    values, gates = torch.stack(group, dim=1).unbind(2)
    pooled = (values * gates.softmax(dim=1)).sum(dim=1)

    kept = live & (position >= batch.seq_lens.long()[request] - ring)
    state[slot[kept], position[kept] % ring] = raw[kept]
    return pooled
