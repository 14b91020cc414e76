"""GraB as pure functions on arrays, for training loops in JAX: see docs/jax.md.

state = init(n, dim, seed=0)
for _ in range(epochs):
    for batch in order(state).reshape(-1, batch_size):
        ...  # per-example gradients of data[batch]
        state = update(state, grads)
    state = next_epoch(state)
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from ordain import RandomReshuffling
from ordain.errors import GradientError, InputError, StepError
from ordain.integrations.packages import require

require("jax", extra="jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

__all__ = ["GraBState", "init", "next_epoch", "order", "update"]

Array = Any  # jax.Array, or a tracer of one


class GraBState(NamedTuple):
    """GraB's state, a pytree of arrays. Fields that the chosen centering does not need are None.

    Attributes:
        order: ``[n]``, the examples in the order of the current epoch.
        places: ``[n]``, by position: +1 goes to the front of the next epoch, -1 to the back, 0 to the middle.
        seen: the number of examples observed in this epoch.
        signed: ``[d]``, the signed sum.
        mean: ``[d]``, the last epoch's mean gradient.
        total: ``[d]``, the sum of this epoch's gradients.
        summed: the number of gradients in it, which are those that are finite.
        waiting: ``[d]``, the gradient of an example that waits for its partner.
        partner: the position of that example; -1 if none waits.
    """

    order: Array
    places: Array
    seen: Array
    signed: Array
    mean: Array | None = None
    total: Array | None = None
    summed: Array | None = None
    waiting: Array | None = None
    partner: Array | None = None


def init(
    n: int, dim: int, *, centering: Literal["mean", "pair"] = "mean", seed: int = 0, dtype: Any = None
) -> GraBState:
    """Return the state before the first epoch, which shares its order with all orders of this ``seed`` and ``n``.

    Args:
        n: the number of examples, or of larger units whose gradients are observed, such as micro-batches.
        dim: d, the length of one gradient over all parameters.
        centering: as in :class:`~ordain.GraB`.
        seed: determines the first order.
        dtype: the dtype of the sums; JAX's default floating-point type by default.
    """
    if centering not in ("mean", "pair"):
        raise InputError(f"centering={centering!r}", expected="'mean' or 'pair'", remedy="'mean' is Algorithm 4.")
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise InputError(
            f"dim={dim!r}",
            expected="the length of a gradient",
            remedy="Pass sum(p.size for p in jax.tree.leaves(params)).",
        )
    first = RandomReshuffling(n, seed=seed, distributed=False).history(0)
    zero, zeros = jnp.zeros((), jnp.int32), jnp.zeros(dim, dtype)
    state = GraBState(
        order=jnp.asarray(first, jnp.int32), places=jnp.zeros(len(first), jnp.int8), seen=zero, signed=zeros
    )
    if centering == "mean":
        return state._replace(mean=zeros, total=zeros, summed=zero)
    return state._replace(waiting=zeros, partner=zero - 1)


def order(state: GraBState) -> Array:
    """Return ``[n]``, the examples in the order in which this epoch visits them."""
    return state.order


def update(state: GraBState, per_example_grads: Any) -> GraBState:
    """Observe the next examples of the epoch: Algorithm 5's signs, one example after the other.

    It is compiled, and may be called inside compiled functions. Batches may be of any size. An example whose gradient
    is not finite gets no sign.

    Args:
        state: the state of the same epoch; replace it with the returned one.
        per_example_grads: ``[B, d]``, or a pytree of ``[B, *shape]`` as returned by ``jax.vmap(jax.grad(loss))``.
    """
    leaves = jax.tree.leaves(per_example_grads)
    shapes = [tuple(jnp.shape(leaf)) for leaf in leaves]
    sizes = {shape[:1] for shape in shapes}
    if (
        len(sizes) != 1
        or () in sizes
        or not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves)
    ):
        raise GradientError(
            f"gradients of shapes {shapes}",
            expected="floating-point numbers, with the same number of examples as the first dimension of each array",
            remedy="Pass [B, d], or what jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)) returns.",
        )
    dim, came = len(state.signed), sum(math.prod(shape[1:]) for shape in shapes)
    if came != dim:
        raise GradientError(
            f"gradients of length {came}",
            expected=f"length {dim}, as in init()",
            remedy="Pass the same parameters every time; a single example is [1, d].",
        )
    return _update_compiled(state, leaves)  # type: ignore[no-any-return]


def next_epoch(state: GraBState) -> GraBState:
    """Adopt the next epoch's order: +1 examples first, -1 examples last and reversed (Algorithm 3).

    Examples without a sign go in the middle, so an epoch may end early.
    """
    n = len(state.order)
    if not isinstance(state.seen, jax.core.Tracer) and int(state.seen) > n:
        raise StepError(
            f"an epoch in which {int(state.seen)} examples were observed",
            expected=f"at most n={n}",
            remedy="Call next_epoch() after each pass over order(state).",
        )
    return _next_compiled(state)  # type: ignore[no-any-return]


def _update(state: GraBState, leaves: list[Array]) -> GraBState:
    dtype, size = state.signed.dtype, len(leaves[0])
    grads = jnp.concatenate([leaf.reshape(size, -1).astype(dtype) for leaf in leaves], axis=1)
    finite = jnp.isfinite(jnp.square(grads).sum(axis=1))
    grads = jnp.where(finite[:, None], grads, 0)
    positions = state.seen + jnp.arange(size, dtype=jnp.int32)
    state = state._replace(seen=state.seen + size)
    if state.waiting is not None:
        return _sign_pairs(state, grads, finite, positions)

    def sign(signed: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        centred, good = row
        chosen = jnp.where(good, _sign(signed, centred), 0)
        return signed + chosen * centred, chosen.astype(jnp.int8)

    signed, signs = jax.lax.scan(sign, state.signed, (grads - state.mean, finite))
    return state._replace(
        signed=signed,
        places=state.places.at[positions].set(signs, mode="drop"),
        total=state.total + grads.sum(axis=0),
        summed=state.summed + finite.sum(dtype=jnp.int32),
    )


def _sign_pairs(state: GraBState, grads: Array, finite: Array, positions: Array) -> GraBState:
    """The sign of first - second; +1 puts the first in front, and the second at the back."""

    def sign(carried: tuple[Array, ...], row: tuple[Array, Array, Array]) -> tuple[tuple[Array, ...], None]:
        signed, waiting, partner, places = carried
        grad, good, position = row
        second, first = good & (partner >= 0), good & (partner < 0)
        difference = waiting - grad
        chosen = jnp.where(second, _sign(signed, difference), 0)
        signed = signed + chosen * difference
        # A place outside of the array is dropped.
        places = places.at[jnp.where(second, partner, len(places))].set(chosen.astype(jnp.int8), mode="drop")
        places = places.at[jnp.where(second, position, len(places))].set(-chosen.astype(jnp.int8), mode="drop")
        waiting = jnp.where(first, grad, waiting)
        partner = jnp.where(first, position, jnp.where(second, -1, partner))
        return (signed, waiting, partner, places), None

    begun = (state.signed, state.waiting, state.partner, state.places)
    (signed, waiting, partner, places), _ = jax.lax.scan(sign, begun, (grads, finite, positions))
    return state._replace(signed=signed, waiting=waiting, partner=partner, places=places)


def _sign(signed: Array, vector: Array) -> Array:
    """Algorithm 5: +1 if the signed sum and the vector point away from each other."""
    inner = jnp.vdot(signed, vector, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(inner < 0, 1, -1).astype(signed.dtype)


def _next_epoch(state: GraBState) -> GraBState:
    n = len(state.order)
    position = jnp.arange(n, dtype=jnp.int32)
    front, back = state.places > 0, state.places < 0
    group = jnp.where(front, 0, jnp.where(back, 2, 1))
    arranged = jnp.lexsort((jnp.where(back, -position, position), group))
    state = state._replace(
        order=state.order[arranged],
        places=jnp.zeros_like(state.places),
        seen=jnp.zeros_like(state.seen),
        signed=jnp.zeros_like(state.signed),
    )
    if state.waiting is not None:
        return state._replace(waiting=jnp.zeros_like(state.waiting), partner=jnp.full_like(state.partner, -1))
    summed: Array = state.summed
    mean = jnp.where(summed > 0, state.total / jnp.maximum(summed, 1), state.mean)
    return state._replace(mean=mean, total=jnp.zeros_like(state.total), summed=jnp.zeros_like(summed))


_update_compiled, _next_compiled = jax.jit(_update), jax.jit(_next_epoch)
