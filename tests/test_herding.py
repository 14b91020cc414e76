"""The herding problem on arrays: against the reference, the paper's statements, and bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BALANCERS, is_permutation, reference_rule
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ordain import Deterministic, KernelHalving, SelfBalancingWalk, _rng, herding, reference
from ordain.errors import BalancingFailedError, InputError
from ordain.herding import balance, greedy, herd, herding_objective, prefix_norms, reorder

FLOATS = st.floats(-10, 10, width=32)
VECTORS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=FLOATS)


def cloud(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, d))


# --- against the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 3), (37, 1), (200, 5), (301, 64)])
@pytest.mark.parametrize("rounds", [0, 1, 10])
def test_herd_is_the_reference(n: int, d: int, rounds: int) -> None:
    z = cloud(n, d)
    assert herd(z, rounds=rounds).tolist() == reference.herd(z, rounds=rounds)
    assert herd(z, rounds=rounds, centering="pair").tolist() == reference.herd_pairs(z, rounds=rounds)


@pytest.mark.parametrize("name", ["deterministic", "walk", "halving"])
def test_balance_is_the_reference(name: str) -> None:
    z = cloud(150, 7) - 0.3
    u = _rng.uniforms(150, seed=4, stream=0).tolist()
    rule = reference_rule(BALANCERS[name], 150, 7)
    if name == "walk":
        rule = reference.walk(BALANCERS[name].parameter(n=150, d=7), largest=float(np.linalg.norm(z, axis=1).max()))
    order = np.random.default_rng(1).permutation(150)
    wanted = reference.balance((z[i] for i in order), rule, u)
    assert balance(z, balancer=BALANCERS[name], order=order, seed=4).tolist() == wanted


def test_balance_walk_with_a_tight_bound_fails_where_the_reference_does() -> None:
    z, c = cloud(400, 3) - 0.5, 3.5
    largest = float(np.linalg.norm(z, axis=1).max())
    outcomes = set()
    for seed in range(40):
        u = _rng.uniforms(400, seed=seed, stream=0).tolist()
        wanted = reference.balance(z, reference.walk(c, largest=largest), u)
        outcomes.add(wanted is None)
        if wanted is None:
            with pytest.raises(BalancingFailedError, match="larger c"):
                balance(z, balancer=SelfBalancingWalk(c=c), seed=seed)
        else:
            assert balance(z, balancer=SelfBalancingWalk(c=c), seed=seed).tolist() == wanted
    assert outcomes == {True, False}  # both ways were tried


def test_herd_starts_a_failed_walk_again() -> None:
    z = cloud(400, 3) - 0.5
    order = herd(z, balancer=SelfBalancingWalk(c=3.5), rounds=5, seed=2)  # fails about half the time
    assert is_permutation(order, 400)
    with pytest.raises(BalancingFailedError):
        herd(z, balancer=SelfBalancingWalk(c=0.05), rounds=1)


@pytest.mark.parametrize("gram_bytes", [2**28, 0])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 2), (60, 4), (90, 33)])
def test_greedy_is_the_reference(monkeypatch: pytest.MonkeyPatch, gram_bytes: int, n: int, d: int) -> None:
    monkeypatch.setattr(herding, "_GREEDY_GRAM_BYTES", gram_bytes)  # both the n x n and the streamed way
    z = cloud(n, d)
    assert greedy(z).tolist() == reference.greedy(z)


def test_objective_and_prefix_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    z = cloud(50, 3)
    order = np.random.default_rng(0).permutation(50)
    sums = np.cumsum(z[order] - z.mean(0), axis=0)
    for blocks in (2**21, 7):  # whole, and in blocks of two rows
        monkeypatch.setattr(herding, "_BLOCK_NUMBERS", blocks)
        for norm in (1, 2, math.inf):
            np.testing.assert_allclose(
                prefix_norms(z, order, norm=norm), np.linalg.norm(sums, ord=norm, axis=1), atol=1e-12
            )
            assert herding_objective(z, order, norm=norm) == pytest.approx(
                reference.herding_objective(z, order.tolist(), norm)
            )


def test_blocks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    z = cloud(101, 4)
    for balancer in (Deterministic(), SelfBalancingWalk(c=20), KernelHalving()):
        for centering in ("mean", "pair"):
            whole = herd(z, balancer=balancer, centering=centering, rounds=3).tolist()
            monkeypatch.setattr(herding, "_BLOCK_NUMBERS", 12)
            assert herd(z, balancer=balancer, centering=centering, rounds=3).tolist() == whole
            monkeypatch.undo()


@given(st.lists(st.sampled_from([1, -1]), max_size=20), st.randoms())
def test_reorder_is_the_reference(signs: list[int], random: Any) -> None:
    order = list(range(len(signs)))
    random.shuffle(order)
    assert reorder(np.array(signs, dtype=np.int8), np.array(order, dtype=int)).tolist() == reference.reorder(
        signs, order
    )


@given(st.lists(st.sampled_from([1, 0, -1]), max_size=20))
def test_reorder_is_always_a_permutation(signs: list[int]) -> None:
    assert is_permutation(reorder(np.array(signs, dtype=np.int8)), len(signs))


# --- what the paper says ------------------------------------------------------------------------------


def statement_1(n: int) -> np.ndarray:
    return np.array([[1.0, 1.0], [4.0, -2.0]]).repeat(n // 2, axis=0)


def test_statement_1_greedy_grows_like_n_and_random_like_its_root() -> None:
    """As its proof does, without line 2 of Alg. 1: centred, these vectors are opposite and greedy alternates."""
    sizes = [64, 256, 1024]
    worst_greedy, worst_random = [], []
    for n in sizes:
        z = statement_1(n)
        order = greedy(z, centre=False)
        assert order.tolist() == list(range(n))  # all of the [1, 1] first
        worst_greedy.append(herding_objective(z, order, norm=2))
        random = [np.random.default_rng(i).permutation(n) for i in range(40)]
        worst_random.append(np.mean([herding_objective(z, one, norm=2) for one in random]))
    slope = np.polyfit(np.log(sizes), np.log(worst_greedy), 1)[0]
    assert slope == pytest.approx(1.0, abs=0.02)
    assert np.polyfit(np.log(sizes), np.log(worst_random), 1)[0] == pytest.approx(0.5, abs=0.15)
    assert max(herding_objective(statement_1(n), herd(statement_1(n)), norm=2) for n in sizes) < 4
    assert max(herding_objective(statement_1(n), greedy(statement_1(n)), norm=2) for n in sizes) < 4


@given(VECTORS, st.randoms(), st.sampled_from([2, math.inf]))
def test_theorem_2_a_round_halves_the_distance_to_the_balancing_bound(z: np.ndarray, random: Any, norm: float) -> None:
    n = len(z)
    order = list(range(n))
    random.shuffle(order)
    z = z - z.mean(axis=0)
    signs = balance(z, order=np.array(order))
    signed = np.cumsum(signs[:, None] * z[order], axis=0)
    a = float(np.linalg.norm(signed, ord=norm, axis=1).max())
    h = herding_objective(z, order, norm=norm)
    assert herding_objective(z, reorder(signs, np.array(order)), norm=norm) <= (a + h) / 2 + 1e-9


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 20))
def test_theorem_4_the_walk_stays_within_c(seed: int, n: int, d: int) -> None:
    z = np.random.default_rng(seed).normal(size=(n, d))
    z /= np.linalg.norm(z, axis=1).max()
    walk = SelfBalancingWalk()
    signed = np.cumsum(balance(z, balancer=walk, seed=seed)[:, None] * z, axis=0)
    assert np.abs(signed).max() <= walk.parameter(n=n, d=d) == 30 * math.log(n * d / 0.01)


def test_the_walk_is_no_coin_toss_when_c_is_small() -> None:
    z = np.random.default_rng(0).normal(size=(4000, 4))
    z /= np.linalg.norm(z, axis=1).max()
    coin = np.random.default_rng(1).choice([-1, 1], size=4000)
    sums = [np.cumsum(e[:, None] * z, axis=0) for e in (balance(z, balancer=SelfBalancingWalk(c=8), seed=0), coin)]
    walk, toss = (float(np.linalg.norm(s, axis=1).max()) for s in sums)
    assert walk < toss / 3


def test_the_toy_of_figure_1b() -> None:
    z = cloud(10_000, 128)
    random = herding_objective(z, norm=2)
    rounds = [herding_objective(z, herd(z, rounds=k), norm=2) for k in (1, 10)]
    assert random / rounds[1] >= 8
    assert random > 1.5 * rounds[0] > 3 * rounds[1]


# --- forms of input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_tensors_answer_in_kind(dtype: torch.dtype) -> None:
    z = torch.from_numpy(cloud(40, 3) * 8).to(dtype)
    same = z.double().numpy() if dtype != torch.float32 else z.numpy()
    for function in (herd, greedy, prefix_norms, balance):
        answer = function(z)
        assert isinstance(answer, torch.Tensor)
        assert answer.tolist() == function(same).tolist()
    assert isinstance(reorder(balance(z)), torch.Tensor)
    assert herding_objective(z) == herding_objective(same)


def test_memory_mapped_and_strided_arrays(tmp_path: Any) -> None:
    z = cloud(60, 4)
    np.save(tmp_path / "z.npy", z)
    mapped = np.load(tmp_path / "z.npy", mmap_mode="r")
    wanted = herd(z).tolist()
    assert herd(mapped).tolist() == wanted
    assert herd(np.asfortranarray(z)).tolist() == wanted
    assert herd(np.repeat(z, 2, axis=0)[::2]).tolist() == wanted
    tensor = torch.from_numpy(z).requires_grad_()
    assert herd(tensor).tolist() == wanted
    np.testing.assert_array_equal(z, cloud(60, 4))  # the input is left alone


def test_progress_reaches_the_end() -> None:
    for call in (lambda p: herd(cloud(50, 2), rounds=3, progress=p), lambda p: greedy(cloud(50, 2), progress=p)):
        seen: list[tuple[int, int]] = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@given(VECTORS, st.sampled_from(["mean", "pair"]), st.sampled_from(sorted(BALANCERS)), st.integers(0, 3))
def test_herd_is_a_deterministic_permutation(z: np.ndarray, centering: Any, name: str, seed: int) -> None:
    if name == "walk-tight":
        return
    order = herd(z, centering=centering, balancer=BALANCERS[name], seed=seed)
    assert is_permutation(order, len(z))
    assert order.tolist() == herd(z, centering=centering, balancer=BALANCERS[name], seed=seed).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: herd(np.zeros(5)), r"got vectors of shape \(5,\); expected \[n, d\]"),
        (lambda: herd(np.zeros((0, 3))), r"shape \(0, 3\)"),
        (lambda: greedy(np.zeros((3, 0))), r"shape \(3, 0\)"),
        (lambda: herd(np.array([["a"]])), "dtype <U1; expected real numbers"),
        (lambda: herd(np.array([[1j]])), "complex128"),
        (lambda: herd(np.array([[1.0], [np.nan], [2.0]])), "NaN or infinity in row 1"),
        (lambda: balance(np.array([[np.inf], [-np.inf]])), "NaN or infinity in row 0"),
        (lambda: herd(np.array([[1e200], [-1e200]])), r"as large as 1e\+200.*Divide all vectors"),
        (lambda: herd(np.eye(3), balancer="walk"), "balancer='walk'"),  # type: ignore[arg-type]
        (lambda: herd(np.eye(3), rounds=-1), "rounds=-1; expected an integer >= 0"),
        (lambda: herd(np.eye(3), centering="median"), "centering='median'; expected 'mean' or 'pair'"),  # type: ignore[arg-type]
        (lambda: herd(np.eye(3), order=[0, 1, 1]), r"a permutation of range\(3\)"),
        (lambda: herd(np.eye(3), order=[0, 1, 3]), r"a permutation of range\(3\)"),
        (lambda: herd(np.eye(3), seed=-1), "seed=-1"),
        (lambda: prefix_norms(np.eye(3), norm=3), "norm=3; expected 1, 2 or math.inf"),
        (lambda: reorder([2, 1]), r"expected \[n\] of \+1, -1"),
        (lambda: SelfBalancingWalk(c=0), "c=0; expected a positive number"),
        (lambda: SelfBalancingWalk(delta=0), "delta=0; expected a probability"),
        (lambda: KernelHalving(delta=1), "delta=1; expected a probability"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_one_vector_is_trivial() -> None:
    one = np.array([[3.0, 4.0]])
    assert herd(one).tolist() == greedy(one).tolist() == herd(one, centering="pair").tolist() == [0]
    assert herding_objective(one) == 0


@pytest.mark.parametrize("tolerance", [0.02, 0.2, 0.4])
@pytest.mark.parametrize("d", [2, 30])
def test_rounds_end_when_they_no_longer_help(d: int, tolerance: float) -> None:
    z = np.random.default_rng(d).normal(size=(400, d))
    found = herd(z, rounds=20, tolerance=tolerance)
    assert found.tolist() == reference.herd(z, rounds=20, tolerance=tolerance)
    orders = [herd(z, rounds=rounds) for rounds in range(20)]
    norms = [herding_objective(z, order, norm=2) for order in orders]
    last = next(r for r in range(1, 20) if norms[r] > (1 - tolerance) * norms[r - 1])
    assert herding_objective(z, found, norm=2) == min(norms[: last + 1]) < norms[0] / 2


def test_a_tolerance_needs_the_norms_of_prefix_sums() -> None:
    z = np.ones((4, 2))
    with pytest.raises(InputError, match="tolerance="):
        herd(z, tolerance=1.5)
    with pytest.raises(InputError, match="centering='pair'"):
        herd(z, tolerance=0.1, centering="pair")
