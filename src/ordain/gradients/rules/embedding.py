"""Tables looked up by id: each example's gradient touches the rows that it looked up, and no others."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ordain.errors import UnsupportedModuleError
from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.rules.registry import Use, register_rule
from ordain.gradients.sparse_rows import SparseRows


@register_rule(nn.Embedding)
def embedding(module: nn.Embedding, uses: list[Use]) -> dict[str, ParamGrads]:
    """Ids ``[B, *]``, output gradient ``[B, *, H]``; further dimensions and uses add entries."""
    refuse_options(module, uses[0].path)
    return {"weight": _rows(module, [_looked_up(use) for use in uses], uses[0].size)}


@register_rule(nn.EmbeddingBag)
def embedding_bag(module: nn.EmbeddingBag, uses: list[Use]) -> dict[str, ParamGrads]:
    """Ids ``[B, N]``, or ``[N]`` with offsets; output gradient ``[B, H]``."""
    refuse_options(module, uses[0].path)
    if module.mode == "max":
        raise uses[0].refusal("EmbeddingBag with mode='max'")
    return {"weight": _rows(module, [_bags(module, use) for use in uses], uses[0].size)}


def _looked_up(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of one use: example ``[N]``, id ``[N]``, gradient ``[N, H]``."""
    ids, b = use.input(), use.grad()
    b = b.reshape(-1, b.shape[-1])
    each = ids.numel() // use.size
    examples = torch.arange(use.size, device=ids.device).repeat_interleave(each)
    return examples, ids.reshape(-1).long(), b


def _bags(module: nn.EmbeddingBag, use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of one use, as for single ids; each has its share of its bag's gradient."""
    given = dict(zip(("input", "offsets", "per_sample_weights"), use.args, strict=False)) | use.kwargs
    ids, offsets, weights = given["input"], given.get("offsets"), given.get("per_sample_weights")
    b = use.grads[0]
    if use.size > 1 and use.axis() != 0:
        raise use.refusal(f"EmbeddingBag, with an output of shape {tuple(b.shape)} that is not one bag per example,")
    if offsets is None:
        counts = torch.full((len(ids),), ids.shape[1], device=ids.device)
    else:
        ends = offsets.new_tensor([len(ids)])
        ends = offsets[1:] if module.include_last_offset else torch.cat([offsets[1:], ends])
        counts = ends - (offsets[:-1] if module.include_last_offset else offsets)
    bags = torch.arange(len(counts), device=ids.device).repeat_interleave(counts)
    ids = ids.reshape(-1).long()
    if module.mode == "mean":
        real = torch.ones_like(ids) if module.padding_idx is None else (ids != module.padding_idx).long()
        members = torch.zeros_like(counts).index_add_(0, bags, real.to(counts.dtype))
        b = b / members.clamp_min(1)[:, None]  # an empty bag is zero and looks nothing up
    b = b[bags]
    if weights is not None:
        b = b * weights.reshape(-1, 1)
    return bags if use.size > 1 else torch.zeros_like(bags), ids, b


def _rows(module: nn.Embedding | nn.EmbeddingBag, uses: list[tuple[Tensor, Tensor, Tensor]], size: int) -> SparseRows:
    """The entries of all uses together, without those of the padding id."""
    examples, ids, b = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*uses, strict=True))
    if module.padding_idx is not None:
        real = ids != module.padding_idx
        examples, ids, b = examples[real], ids[real], b[real]
    return SparseRows(examples, ids, b, size=size, rows=len(module.weight))


_REMEDIES = {
    "scale_grad_by_freq": "Build it with scale_grad_by_freq=False: the counts are those of the whole batch, "
    "so no example has a gradient of its own.",
    "max_norm": "Build it with max_norm=None and bound the rows after the optimizer's step: "
    "the forward changes the weight in place.",
    "sparse": "Build it with sparse=False.",
}


def refuse_options(
    module: nn.Embedding | nn.EmbeddingBag, path: str, options: Collection[str] = _REMEDIES.keys()
) -> None:
    """Options under which examples change one another's gradients, or gradients are no dense tensors."""
    for option in options:
        if getattr(module, option):
            raise UnsupportedModuleError(
                f"{type(module).__name__} at {path!r} with {option}={getattr(module, option)}",
                expected=f"{option}={'None' if option == 'max_norm' else 'False'}",
                remedy=f"{_REMEDIES[option]} Or leave this layer out with "
                f"params=lambda name: not name.startswith({path + '.'!r}).",
            )
