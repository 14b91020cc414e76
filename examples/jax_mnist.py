"""GraB in JAX, with optax: scikit-learn's digits, which are a small MNIST.

    python examples/jax_mnist.py --out runs/jax
    python examples/jax_mnist.py --out runs/jax --resume --epochs 6

Differences from reshuffling are marked (1) to (4).
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from ordain.integrations import jax as grab

found = load_digits()
images, labels = jnp.asarray(found.data, jnp.float32) / 16, jnp.asarray(found.target)
optimizer = optax.adam(1e-2)


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of one example."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["w2"] + params["b2"], y)


@jax.jit
def step(params: Any, opt: Any, order: grab.GraBState, batch: jax.Array) -> Any:
    """Train on the examples of these indices."""
    each = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))  # (1) gradients of single examples
    losses, grads = each(params, images[batch], labels[batch])
    order = grab.update(order, grads)  # (2)
    updates, opt = optimizer.update(jax.tree.map(lambda g: g.mean(axis=0), grads), opt, params)
    return optax.apply_updates(params, updates), opt, order, losses.mean()


def main() -> None:
    """Train, save after each epoch, and print."""
    parser = argparse.ArgumentParser(description="Digits in GraB's order, with JAX.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w1": jax.random.normal(keys[0], (64, 32)) / 8, "b1": jnp.zeros(32)}
    params |= {"w2": jax.random.normal(keys[1], (32, 10)) / 32**0.5, "b2": jnp.zeros(10)}
    dim = sum(p.size for p in jax.tree.leaves(params))
    order = grab.init(len(images), dim, centering="pair", seed=0)  # (3)
    opt, done, path = optimizer.init(params), 0, options.out / "run.pkl"
    if options.resume:
        done, params, opt, order = pickle.loads(path.read_bytes())  # noqa: S301 (a file of our own)
    for epoch in range(done, options.epochs):
        losses = []
        visited = grab.order(order)
        for start in range(0, len(visited), options.batch_size):
            params, opt, order, mean = step(params, opt, order, visited[start : start + options.batch_size])
            losses.append(mean)
        order = grab.next_epoch(order)  # (4)
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(jax.tree.map(np.asarray, (epoch + 1, params, opt, order))))
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    main()
