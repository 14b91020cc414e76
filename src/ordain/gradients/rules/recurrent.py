"""LSTM, GRU and RNN: backward through time once more, for the gradients at the gates.

A layer's hidden states h_t, from torch's own forward, give the gates of all steps in one product; their
derivatives are taken for all steps at once. What is left for the walk back through time is
dh_t = dy_t + (gates' gradient at t + 1) W_hh and a product or two with those derivatives. From the gates'
gradients the weights' are those of linear layers with one row a step.

Shapes: T steps, B sequences, H hidden, R = H or the size of the projection, G gates. Inside, steps come first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ordain.errors import UnsupportedModuleError
from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.rules.linear import affine
from ordain.gradients.rules.registry import Names, Use, register_rule


@dataclass
class _Weights:
    """One direction of one layer: ih ``[G H, in]``, hh ``[G H, R]``, and hr ``[R, H]`` if it projects."""

    ih: Tensor
    hh: Tensor
    hr: Tensor | None
    biases: tuple[Tensor, Tensor] | None

    def joined(self) -> list[Tensor]:
        """In the order of torch's own forward."""
        return [self.ih, self.hh, *(self.biases or ()), *([] if self.hr is None else [self.hr])]


@dataclass
class _Traced:
    """One direction of one layer in one use; ``[T, B, features]`` each.

    Attributes:
        x: the layer's input, in the direction's order.
        before: h_(t-1), what the step started from.
        at_input: the gradient at W_ih x + b_ih.
        at_hidden: the gradient at W_hh h + b_hh; another one only for the GRU's new gate.
        projected: input of W_hr and the gradient at its output, if it projects.
    """

    x: Tensor
    before: Tensor
    at_input: Tensor
    at_hidden: Tensor
    projected: tuple[Tensor, Tensor] | None = None


def refuse(
    module: nn.RNNBase, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """Refuse what cannot be run again, before it is run."""
    kind = type(module).__name__
    if module.dropout > 0 and module.num_layers > 1:
        raise UnsupportedModuleError(
            f"{kind} at {path!r} with dropout={module.dropout} between its {module.num_layers} layers",
            expected="dropout=0, as the dropped values are not to be seen from outside",
            remedy=f"Use {kind} modules of one layer each with nn.Dropout between them.",
        )
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedModuleError(
            f"{kind} at {path!r} called with a PackedSequence",
            expected="a padded tensor, where each example has its own row",
            remedy="Pass the padded tensor and leave the padded steps out of the loss, or leave this layer out "
            "with params=.",
        )
    return nullcontext()


@register_rule(nn.LSTM, nn.GRU, nn.RNN, watch=refuse)
def recurrent(module: nn.RNNBase, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Inputs ``[T, B, in]`` or ``[B, T, in]``; uses add along T."""
    forms: dict[Names, ParamGrads] = {}

    def put(kind: str, a: list[Tensor], b: list[Tensor]) -> None:
        bias = bool(module.bias) and not kind.startswith("hr")
        names = f"weight_{kind}", f"bias_{kind}"
        forms.update(affine(_rows(a, uses[0].size), _rows(b, uses[0].size), bias=bias, names=names))

    with torch.no_grad():
        traced = [_trace(module, use) for use in uses]
        for suffix in traced[0]:
            several = [one[suffix] for one in traced]
            put(f"ih_{suffix}", [one.x for one in several], [one.at_input for one in several])
            put(f"hh_{suffix}", [one.before for one in several], [one.at_hidden for one in several])
            projected = [one.projected for one in several if one.projected is not None]
            if projected:
                put(f"hr_{suffix}", [a for a, _ in projected], [b for _, b in projected])
    return forms


@register_rule(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(module: nn.RNNCellBase, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Inputs ``[B, in]``. Calls are joined by autograd, not in here: all are steps of their own, taken at once."""
    weights = _Weights(
        module.weight_ih.detach(),
        module.weight_hh.detach(),
        None,
        (module.bias_ih.detach(), module.bias_hh.detach()) if module.bias else None,
    )
    size = uses[0].size

    def joined(tensors: list[Tensor | None]) -> Tensor:
        """``[B, features]`` a use, to ``[1, B * uses, features]``; zeros where there is none."""
        some = next((t for t in tensors if t is not None), None)
        zeros = weights.hh.new_zeros(*xs[0].shape[:-1], module.hidden_size) if some is None else torch.zeros_like(some)
        rows = [(zeros if t is None else t).to(weights.hh) for t in tensors]
        return torch.stack([row.reshape(size, -1, row.shape[-1]) for row in rows], dim=1).reshape(
            1, -1, rows[0].shape[-1]
        )

    xs: list[Tensor] = []
    states: list[tuple[Tensor | None, Tensor | None]] = []
    for use in uses:
        x, hidden = use.argument(0, "input"), use.argument(1, "hx")
        if size > 1 and (x.ndim != 2 or use.axis(x) != 0):
            raise use.refusal(
                f"{type(module).__name__}, whose input of shape {tuple(x.shape)} is not one row an example,"
            )
        xs.append(x)
        states.append(hidden if isinstance(hidden, tuple | list) else (hidden, None))  # type: ignore[arg-type]
    with torch.no_grad():
        before, memory = joined([h for h, _ in states]), joined([c for _, c in states])[0]
        dy = joined([use.grads.get(0) for use in uses])
        dc = joined([use.grads.get(1) for use in uses])[0]
        # But for CUDA's fused cell, autograd sees h' being made from c', and what arrives at c' has that in it.
        whole = not xs[0].is_cuda
        one = _back(_kind(module), weights, joined(list(xs)), before, memory, dy, dc, whole=whole)
        inputs = affine(
            _rows([one.x], size), _rows([one.at_input], size), bias=bool(module.bias), names=("weight_ih", "bias_ih")
        )
        hiddens = affine(
            _rows([one.before], size),
            _rows([one.at_hidden], size),
            bias=bool(module.bias),
            names=("weight_hh", "bias_hh"),
        )
    return inputs | hiddens


def _rows(parts: list[Tensor], size: int) -> Tensor:
    """``[T, B, features]`` each, to one ``[B, T, features]``; with one example, all sequences are its own."""
    flat = [part.transpose(0, 1).reshape(size, -1, part.shape[2]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _trace(module: nn.RNNBase, use: Use) -> dict[str, _Traced]:
    """Every direction of every layer, by the end of its parameters' names."""
    given = use.argument(0, "input")
    batched = given.ndim == 3
    if use.size > 1 and (not batched or use.axis(given) != (0 if module.batch_first else 1)):
        raise use.refusal(
            f"{type(module).__name__} with batch_first={module.batch_first}, whose input of shape "
            f"{tuple(given.shape)} does not have its examples where the layer has its sequences,"
        )
    x = _steps_first(given, module)
    hidden = use.argument(1, "hx")
    states = [] if hidden is None else [hidden] if isinstance(hidden, Tensor) else list(hidden)
    states = [state if batched else state.unsqueeze(1) for state in states]
    finals = {leaf: grad if batched else grad.unsqueeze(1) for leaf, grad in use.grads.items() if leaf > 0}
    directions = ["", "_reverse"] if module.bidirectional else [""]
    flips = {"": False, "_reverse": True}

    # Forward: the inputs and hidden states of every layer, from torch's own kernels.
    layers: list[tuple[Tensor, list[Tensor], list[list[Tensor]]]] = []
    for layer in range(module.num_layers):
        outputs, starts = [], []
        for d, direction in enumerate(directions):
            weights = _weights(module, f"l{layer}{direction}")
            place = layer * len(directions) + d
            start = [state[place : place + 1].to(weights.ih) for state in states] or _zeros(module, weights, x)
            outputs.append(_run(module, weights, x.flip(0) if flips[direction] else x, start))
            starts.append(start)
        layers.append((x, outputs, starts))
        ways = [h.flip(0) if flips[direction] else h for h, direction in zip(outputs, directions, strict=True)]
        x = ways[0] if len(ways) == 1 else torch.cat(ways, dim=2)

    # Backward: from the last layer, the gradient at a layer's output becomes that at its input.
    dy = _steps_first(use.grads[0], module).to(x) if 0 in use.grads else torch.zeros_like(x)
    traced = {}
    for layer in reversed(range(module.num_layers)):
        x, outputs, starts = layers[layer]
        dx = torch.zeros_like(x) if layer else None
        parts = dy.chunk(len(directions), dim=2)
        for d, direction in enumerate(directions):
            weights = _weights(module, f"l{layer}{direction}")
            place = layer * len(directions) + d
            ends = [finals[leaf][place].to(x) if leaf in finals else None for leaf in (1, 2)]
            back = parts[d].flip(0) if flips[direction] else parts[d].clone()
            if ends[0] is not None:
                back[-1] += ends[0]
            before = torch.cat([starts[d][0], outputs[d][:-1]])
            memory = starts[d][-1][0]
            one = _back(_kind(module), weights, x.flip(0) if flips[direction] else x, before, memory, back, ends[1])
            traced[f"l{layer}{direction}"] = one
            if dx is not None:
                arrived = one.at_input @ weights.ih
                dx += arrived.flip(0) if flips[direction] else arrived
        if dx is not None:
            dy = dx
    return traced


def _steps_first(tensor: Tensor, module: nn.RNNBase) -> Tensor:
    if tensor.ndim == 2:
        return tensor.unsqueeze(1)
    return tensor.transpose(0, 1) if module.batch_first else tensor


def _weights(module: nn.RNNBase, suffix: str) -> _Weights:
    def named(kind: str) -> Tensor:
        return module.get_parameter(f"{kind}_{suffix}").detach()

    return _Weights(
        named("weight_ih"),
        named("weight_hh"),
        named("weight_hr") if module.proj_size else None,
        (named("bias_ih"), named("bias_hh")) if module.bias else None,
    )


def _zeros(module: nn.RNNBase, weights: _Weights, x: Tensor) -> list[Tensor]:
    """The states that a sequence starts from when none are given: ``[1, B, R]``, and ``[1, B, H]`` for c."""
    h = weights.ih.new_zeros(1, x.shape[1], weights.hh.shape[1])
    return [h, weights.ih.new_zeros(1, x.shape[1], module.hidden_size)] if isinstance(module, nn.LSTM) else [h]


def _run(module: nn.RNNBase, weights: _Weights, x: Tensor, start: list[Tensor]) -> Tensor:
    """The hidden states ``[T, B, R]`` of one direction of one layer."""
    options: tuple[bool, int, float, bool, bool, bool] = (weights.biases is not None, 1, 0.0, False, False, False)
    x = x.to(weights.ih)
    if isinstance(module, nn.LSTM):
        return torch.lstm(x, start, weights.joined(), *options)[0]
    if isinstance(module, nn.GRU):
        return torch.gru(x, start[0], weights.joined(), *options)[0]
    run = torch.rnn_relu if module.nonlinearity == "relu" else torch.rnn_tanh
    return run(x, start[0], weights.joined(), *options)[0]


def _kind(module: nn.RNNBase | nn.RNNCellBase) -> str:
    """``"lstm"``, ``"gru"``, ``"tanh"`` or ``"relu"``."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    return str(module.nonlinearity)


def _back(
    kind: str,
    weights: _Weights,
    x: Tensor,
    before: Tensor,
    memory: Tensor,
    dy: Tensor,
    dc: Tensor | None,
    *,
    whole: bool = False,
) -> _Traced:
    """One direction of one layer.

    Args:
        kind: see :func:`_kind`.
        weights: of this direction of this layer.
        x: ``[T, B, in]``, its input.
        before: ``[T, B, R]``, the hidden state that each step started from.
        memory: ``[B, H]``, the LSTM's c that the first step started from; else unused.
        dy: ``[T, B, R]``, the gradient at its outputs.
        dc: ``[B, H]``, the gradient at the LSTM's last c.
        whole: of one step, dc has what comes back through its h in it already.
    """
    x = x.to(weights.ih)
    at_x = torch.nn.functional.linear(x, weights.ih, weights.biases and weights.biases[0])
    at_h = torch.nn.functional.linear(before, weights.hh, weights.biases and weights.biases[1])
    if kind == "lstm":
        gates, projected = _lstm(weights, at_x.add_(at_h), memory, dy, dc, whole=whole)
        return _Traced(x, before, gates, gates, projected)
    if kind == "gru":
        return _Traced(x, before, *_gru(weights, at_x, at_h, before, dy))
    gates = _rnn(weights, at_x.add_(at_h), dy, kind)
    return _Traced(x, before, gates, gates)


def _rnn(weights: _Weights, pre: Tensor, dy: Tensor, kind: str) -> Tensor:
    """The gradient at the pre-activations ``[T, B, H]``."""
    slopes = (pre > 0).to(pre) if kind == "relu" else 1 - pre.tanh().square_()
    gates = torch.empty_like(dy)
    after: Tensor | None = None
    for back, slope, gate in zip(*(reversed(t.unbind()) for t in (dy, slopes, gates)), strict=True):
        dh = back if after is None else torch.addmm(back, after, weights.hh)
        after = torch.mul(dh, slope, out=gate)
    return gates


def _lstm(
    weights: _Weights, pre: Tensor, c0: Tensor, dy: Tensor, dc: Tensor | None, *, whole: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The gradient at the gates' pre-activations ``[T, B, 4H]``, and of a projection its two factors."""
    steps, size, _ = pre.shape
    i, f, g, o = (part.contiguous() for part in pre.chunk(4, dim=2))
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    cells = torch.empty(steps + 1, *c0.shape, dtype=pre.dtype, device=pre.device)
    cells[0] = c0
    for new, keep, c, after in zip((i * g).unbind(), f.unbind(), cells[:-1].unbind(), cells[1:].unbind(), strict=True):
        torch.addcmul(new, keep, c, out=after)
    shown = cells[1:].tanh()
    # dc = dh * through + dc_next * f;  d(i, f, g) = dc * slopes;  do = dh * slope_o.
    through = o * (1 - shown * shown)
    slopes = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], dim=2)
    slope_o = shown * o * (1 - o)
    gates = torch.empty_like(pre)
    parts = gates.view(steps, size, 4, -1)
    carry = torch.zeros_like(c0) if dc is None else dc
    after_gates: Tensor | None = None
    heads = []
    walk = (dy, through, slopes, slope_o, f, gates, parts[:, :, :3], parts[:, :, 3])
    for back, way, slope, out_slope, keep, gate, ifg, out in zip(*(reversed(t.unbind()) for t in walk), strict=True):
        dh = back if after_gates is None else torch.addmm(back, after_gates, weights.hh)
        if weights.hr is not None:
            heads.append(dh)
            dh = dh @ weights.hr
        dc = carry if whole else torch.addcmul(carry, dh, way)
        torch.mul(dc.unsqueeze(1), slope, out=ifg)
        torch.mul(dh, out_slope, out=out)
        carry = dc * keep
        after_gates = gate
    return gates, None if weights.hr is None else (o * shown, torch.stack(heads[::-1]))


def _gru(weights: _Weights, at_x: Tensor, at_h: Tensor, before: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients at W_ih x + b_ih and at W_hh h + b_hh, ``[T, B, 3H]`` each."""
    steps, size, _ = at_x.shape
    xr, xz, xn = at_x.chunk(3, dim=2)
    hr, hz, hn = at_h.chunk(3, dim=2)
    r, z = (xr + hr).sigmoid_(), (xz + hz).sigmoid_()
    n = (xn + r * hn).tanh_()
    # h = (1 - z) n + z h_prev with n = tanh(xn + r hn): every gate's gradient is dh times its slope.
    slope_n = (1 - z) * (1 - n * n)
    slopes = torch.stack([slope_n * hn * r * (1 - r), (before - n) * z * (1 - z), slope_n * r], dim=2)
    at_hidden = torch.empty_like(at_h)
    hidden = torch.empty_like(dy)
    dh: Tensor | None = None
    after = z_after = dy[0]
    walk = (dy, slopes, z, at_hidden, at_hidden.view(steps, size, 3, -1), hidden)
    for back, slope, keep, gates, parts, kept in zip(*(reversed(t.unbind()) for t in walk), strict=True):
        if dh is None:
            dh = kept.copy_(back)
        else:
            dh = torch.addcmul(torch.addmm(back, after, weights.hh), dh, z_after, out=kept)
        torch.mul(dh.unsqueeze(1), slope, out=parts)
        after, z_after = gates, keep
    at_input = at_hidden.clone()
    torch.mul(hidden, slope_n, out=at_input.view(steps, size, 3, -1)[:, :, 2])
    return at_input, at_hidden
