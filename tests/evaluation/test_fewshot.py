"""The few-shot regression against big_vision's evaluator: its indices, weights, scores and accuracies."""

import numpy as np
import pytest

from vit_tpu.errors import UserError
from vit_tpu.evaluation import fewshot

CASES = ("n_lt_d", "n_ge_d", "n10shot")


def _case(refs, name):
    stored = refs("fewshot.npz")
    part = {key.split("/")[1]: stored[key] for key in stored.files if key.startswith(name + "/")}
    return part, refs("fewshot.json")[name]


@pytest.mark.parametrize("name", CASES)
def test_scores_and_weights_on_all_training_examples(refs, name):
    arrays, facts = _case(refs, name)
    fitted = fewshot.fit(arrays["xtr"], arrays["ytr"], facts["num_classes"])
    scores = fitted.scores(arrays["xte"])
    np.testing.assert_allclose(scores, arrays["scores_all"], rtol=1e-3)  # element by element
    np.testing.assert_allclose(fitted.weights, arrays["w_all"], atol=5e-5)
    assert (scores.argmax(1) == arrays["yte"]).mean() == pytest.approx(facts["acc_all"], abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_choice_and_accuracy_for_every_seed_and_shot(refs, name):
    arrays, facts = _case(refs, name)
    for seed in (0, 1, 2):
        for shots in (1, 5, 10):
            chosen = fewshot.choose(arrays["ytr"], shots, seed, facts["num_classes"])
            np.testing.assert_array_equal(chosen, arrays[f"idx_seed{seed}_{shots}shot"])
    found = fewshot.few_shot(arrays["xtr"], arrays["ytr"], arrays["xte"], arrays["yte"], (1, 5, 10))
    assert len(found.rows) == 9
    for row in found.rows:
        wanted = facts["acc_by_seed_by_shots"][str(row["seed"])][str(row["shots"])]
        assert row["accuracy"] == pytest.approx(wanted, abs=1e-6)
    wanted = [facts["acc_by_seed_by_shots"][str(seed)]["5"] for seed in range(3)]
    assert found.mean(5) == pytest.approx(np.mean(wanted), abs=1e-6)
    assert found.to_dict()["mean"]["5"] == found.mean(5)
    lines = str(found).splitlines()
    assert len(lines) == 4 and f"{100 * found.mean(5):.2f}%" in lines[2]


def test_the_two_ways_to_solve_agree_with_the_normal_equations():
    rng = np.random.default_rng(0)
    for examples, width in ((40, 6), (6, 40)):
        x, y = rng.normal(size=(examples, width)), rng.integers(0, 3, examples)
        fitted = fewshot.fit(x, y, 3, l2=7.0)
        whitened = np.c_[(x - x.mean(0)) / (x.std(0) + 1e-5), np.full(examples, 100.0)]
        wanted = np.linalg.solve(whitened.T @ whitened + 7.0 * np.eye(width + 1), whitened.T @ (2 * np.eye(3)[y] - 1))
        np.testing.assert_allclose(fitted.weights, wanted, rtol=1e-7, atol=1e-10)


def test_a_class_with_too_few_examples_is_named():
    labels = np.array([0, 0, 0, 1, 1])
    with pytest.raises(UserError, match="class dog has 2"):
        fewshot.choose(labels, 3, 0, 2, ("cat", "dog"))
