"""LSTM, GRU and RNN: backward through time once more, for the gradients at the gates.

A layer's hidden states h_t, from torch's own forward, give the gates of all steps in one product; their
derivatives are taken for all steps at once. What is left for the walk back through time is
dh_t = dy_t + (gates' gradient at t + 1) W_hh and a product or two with those derivatives. From the gates'
gradients the weights' are those of linear layers with one row a step.

Shapes: T steps, B sequences, H hidden, R = H or the size of the projection, G gates. Inside, steps come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.rules.linear import affine
from ordain.gradients.rules.registry import Names, Use, register_rule

_Factors = dict[str, tuple[Tensor, Tensor]]  # "ih", "hh", "hr": input of that weight and gradient at its output


@dataclass
class _Weights:
    """One direction of one layer, or a cell: ih ``[G H, in]``, hh ``[G H, R]``, and hr ``[R, H]`` if it projects."""

    ih: Tensor
    hh: Tensor
    hr: Tensor | None
    biases: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, module: nn.RNNBase | nn.RNNCellBase, suffix: str = "") -> _Weights:
        """The weights of ``module`` whose names end in ``suffix``."""

        def named(kind: str) -> Tensor:
            return module.get_parameter(f"{kind}{suffix}").detach()

        hr = named("weight_hr") if getattr(module, "proj_size", 0) else None
        return cls(
            named("weight_ih"), named("weight_hh"), hr, (named("bias_ih"), named("bias_hh")) if module.bias else None
        )

    def joined(self) -> list[Tensor]:
        """In the order of torch's own forward."""
        return [self.ih, self.hh, *(self.biases or ()), *([] if self.hr is None else [self.hr])]


@register_rule(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(module: nn.RNNBase, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Inputs ``[T, B, in]`` or ``[B, T, in]``; uses add along T."""
    grads: dict[Names, ParamGrads] = {}
    with torch.no_grad():
        traced = [_trace(module, use) for use in uses]
        for suffix in traced[0]:
            grads |= _affine([one[suffix] for one in traced], uses[0].size, bias=bool(module.bias), suffix=suffix)
    return grads


@register_rule(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(module: nn.RNNCellBase, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Inputs ``[B, in]``. Calls are joined by autograd, not in here: all are steps of their own, taken at once."""
    size, weights = uses[0].size, _Weights.of(module)
    xs: list[Tensor] = []
    states: list[list[Tensor | None]] = []
    for use in uses:
        x, hidden = use.argument(0, "input"), use.argument(1, "hx")
        if size > 1 and (x.ndim != 2 or any(use.axis(leaf) != 0 for leaf in use.grads)):
            raise use.refusal(
                f"{type(module).__name__}, whose input of shape {tuple(x.shape)} does not have one row per example,"
            )
        xs.append(x)
        states.append(list(hidden) if isinstance(hidden, tuple | list) else [hidden, None])

    def joined(tensors: list[Tensor | None]) -> Tensor:
        """``[B, features]`` a use, to ``[1, B * uses, features]``; zeros of the hidden size where there is none."""
        zeros = weights.hh.new_zeros(*xs[0].shape[:-1], module.hidden_size)
        rows = [(zeros if t is None else t).to(weights.hh) for t in tensors]
        return torch.stack([row.reshape(size, -1, row.shape[-1]) for row in rows], dim=1).flatten(0, 2).unsqueeze(0)

    with torch.no_grad():
        before, memory = (joined([state[i] for state in states]) for i in (0, 1))
        dy, dc = (joined([use.grads.get(leaf) for use in uses]) for leaf in (0, 1))
        # But for CUDA's fused cell, autograd sees h' being computed from c', and the gradient at c' has that in it.
        whole = not xs[0].is_cuda
        factors = _back(_kind(module), weights, joined(list(xs)), before, memory[0], dy, dc[0], whole=whole)
        return _affine([factors], size, bias=bool(module.bias))


def _affine(several: list[_Factors], size: int, *, bias: bool, suffix: str = "") -> dict[Names, ParamGrads]:
    """The gradients of all weights and biases whose names end in ``suffix``, from the factors of each use."""

    def rows(parts: tuple[Tensor, ...]) -> Tensor:
        """``[T, B, features]`` each, to one ``[B, T, features]``; with one example, all sequences are its own."""
        flat = [part.transpose(0, 1).reshape(size, -1, part.shape[2]) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    grads: dict[Names, ParamGrads] = {}
    for kind in several[0]:
        a, b = zip(*(factors[kind] for factors in several), strict=True)
        names = f"weight_{kind}{suffix}", f"bias_{kind}{suffix}"
        grads |= affine(rows(a), rows(b), bias=bias and kind != "hr", names=names)
    return grads


def _trace(module: nn.RNNBase, use: Use) -> dict[str, _Factors]:
    """Every direction of every layer, by the end of its parameters' names."""
    given = use.argument(0, "input")
    if isinstance(given, PackedSequence) or (module.dropout > 0 and module.num_layers > 1):
        raise use.refusal(f"{type(module).__name__} with a PackedSequence, or dropout between its layers,")
    batched = given.ndim == 3
    axes = {leaf: 0 if leaf == 0 and module.batch_first else 1 for leaf in use.grads}
    if use.size > 1 and (not batched or any(use.axis(leaf) != axis for leaf, axis in axes.items())):
        raise use.refusal(
            f"{type(module).__name__} with batch_first={module.batch_first}, whose input of shape "
            f"{tuple(given.shape)} does not have its examples in the layer's batch dimension,"
        )
    hidden = use.argument(1, "hx")
    states = [] if hidden is None else [hidden] if isinstance(hidden, Tensor) else list(hidden)
    states = [state if batched else state.unsqueeze(1) for state in states]
    finals = {leaf: grad if batched else grad.unsqueeze(1) for leaf, grad in use.grads.items() if leaf > 0}
    ways = 2 if module.bidirectional else 1
    suffixes = [f"_l{layer}{way}" for layer in range(module.num_layers) for way in ("", "_reverse")[:ways]]
    weights = [_Weights.of(module, suffix) for suffix in suffixes]

    # Forward: the inputs and hidden states of every layer, from torch's own kernels.
    x = _steps_first(given, module)
    inputs, starts, outputs = [], [], []
    for place, weight in enumerate(weights):
        inputs.append(_turned(x, place % ways))
        starts.append([state[place : place + 1].to(weight.ih) for state in states] or _zeros(module, weight, x))
        outputs.append(_run(module, weight, inputs[-1], starts[-1]))
        if place % ways == ways - 1:
            x = torch.cat([_turned(h, way) for way, h in enumerate(outputs[-ways:])], dim=2)

    # Backward: from the last layer, the gradient at a layer's output becomes that at its input.
    dy = _steps_first(use.grads[0], module).to(x) if 0 in use.grads else torch.zeros_like(x)
    dx: Tensor | None = None
    traced: dict[str, _Factors] = {}
    for place in reversed(range(len(weights))):
        way = place % ways
        back = _turned(dy.chunk(ways, dim=2)[way], way).clone()
        dh, dc = (finals[leaf][place].to(x) if leaf in finals else None for leaf in (1, 2))
        if dh is not None:
            back[-1] += dh
        before = torch.cat([starts[place][0], outputs[place][:-1]])
        memory = starts[place][-1][0]
        factors = _back(_kind(module), weights[place], inputs[place], before, memory, back, dc)
        traced[suffixes[place]] = factors
        if place >= ways:
            at_x = _turned(factors["ih"][1] @ weights[place].ih, way)
            dx = at_x if dx is None else dx + at_x
            if way == 0:
                dy, dx = dx, None
    return traced


def _turned(tensor: Tensor, way: int) -> Tensor:
    """Steps in the order of a direction: 0 is forward, 1 is back."""
    return tensor.flip(0) if way else tensor


def _steps_first(tensor: Tensor, module: nn.RNNBase) -> Tensor:
    if tensor.ndim == 2:
        return tensor.unsqueeze(1)
    return tensor.transpose(0, 1) if module.batch_first else tensor


def _zeros(module: nn.RNNBase, weights: _Weights, x: Tensor) -> list[Tensor]:
    """The states that a sequence starts from when none are given: ``[1, B, R]``, and ``[1, B, H]`` for c."""
    h = weights.ih.new_zeros(1, x.shape[1], weights.hh.shape[1])
    return [h, weights.ih.new_zeros(1, x.shape[1], module.hidden_size)] if isinstance(module, nn.LSTM) else [h]


def _kind(module: nn.RNNBase | nn.RNNCellBase) -> str:
    """``"lstm"``, ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``, the name of torch's function."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return "gru" if isinstance(module, nn.GRU | nn.GRUCell) else f"rnn_{module.nonlinearity}"


def _run(module: nn.RNNBase, weights: _Weights, x: Tensor, start: list[Tensor]) -> Tensor:
    """The hidden states ``[T, B, R]`` of one direction of one layer."""
    options = weights.biases is not None, 1, 0.0, False, False, False
    states = start if isinstance(module, nn.LSTM) else start[0]
    hidden: Tensor = getattr(torch, _kind(module))(x.to(weights.ih), states, weights.joined(), *options)[0]
    return hidden


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
) -> _Factors:
    """One direction of one layer.

    Args:
        kind: see :func:`_kind`.
        weights: of this direction of this layer.
        x: ``[T, B, in]``, its input.
        before: ``[T, B, R]``, the hidden state that each step started from.
        memory: ``[B, H]``, the LSTM's c that the first step started from; else unused.
        dy: ``[T, B, R]``, the gradient at its outputs.
        dc: ``[B, H]``, the gradient at the LSTM's last c.
        whole: for a single step, whether dc already includes the gradient through its h.
    """
    x = x.to(weights.ih)
    at_x = torch.nn.functional.linear(x, weights.ih, weights.biases and weights.biases[0])
    at_h = torch.nn.functional.linear(before, weights.hh, weights.biases and weights.biases[1])
    projected: _Factors = {}
    if kind == "gru":
        at_input, at_hidden = _gru(weights, at_x, at_h, before, dy)
    elif kind == "lstm":
        at_input, projected = _lstm(weights, at_x.add_(at_h), memory, dy, dc, whole=whole)
        at_hidden = at_input
    else:
        at_input = at_hidden = _rnn(weights, at_x.add_(at_h), dy, kind)
    return {"ih": (x, at_input), "hh": (before, at_hidden), **projected}


def _rnn(weights: _Weights, pre: Tensor, dy: Tensor, kind: str) -> Tensor:
    """The gradient at the pre-activations ``[T, B, H]``."""
    slopes = (pre > 0).to(pre) if kind == "rnn_relu" else 1 - pre.tanh().square_()
    gates = torch.empty_like(dy)
    after: Tensor | None = None
    for back, slope, gate in zip(*(reversed(t.unbind()) for t in (dy, slopes, gates)), strict=True):
        dh = back if after is None else torch.addmm(back, after, weights.hh)
        after = torch.mul(dh, slope, out=gate)
    return gates


def _lstm(
    weights: _Weights, pre: Tensor, c0: Tensor, dy: Tensor, dc: Tensor | None, *, whole: bool = False
) -> tuple[Tensor, _Factors]:
    """The gradient at the gates' pre-activations ``[T, B, 4H]``, and the factors of a projection."""
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
    return gates, {"hr": (o * shown, torch.stack(heads[::-1]))} if heads else {}


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
