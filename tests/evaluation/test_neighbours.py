"""k-NN by cosine: real features with a stored result, scikit-learn, and draws by hand."""

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from vit_tpu.errors import UserError
from vit_tpu.evaluation import neighbours


@pytest.mark.parametrize(
    ("k", "temperature", "right"), [(1, None, 19), (5, None, 23), (10, None, 20), (10, 0.07, 16), (10, 0.02, 19)]
)
def test_features_of_real_weights_give_the_stored_hits(refs, k, temperature, right):
    stored = refs("dinov2_features.npz")
    train, labels = stored["A"].astype(np.float32), stored["ya"].astype(np.int64)
    found = neighbours.predict(train, labels, stored["B"].astype(np.float32), k=k, temperature=temperature)
    assert (found == stored["yb"]).sum() == right


def test_majority_is_scikit_learns(monkeypatch):
    monkeypatch.setattr(neighbours, "_BLOCK", 7)  # several blocks
    rng = np.random.default_rng(0)
    train, labels, test = rng.normal(size=(60, 5)), rng.integers(0, 4, 60), rng.normal(size=(30, 5))
    wanted = KNeighborsClassifier(9, metric="cosine", algorithm="brute").fit(train, labels).predict(test)
    np.testing.assert_array_equal(neighbours.predict(train, labels, test, k=9), wanted)


def test_length_of_features_does_not_matter():
    train, labels = np.array([[1.0, 0.0], [0.0, 100.0]]), np.array([0, 1])
    assert neighbours.predict(train, labels, np.array([[5.0, 4.0]]), k=1).tolist() == [0]


def test_temperature_lets_near_ones_outvote_many():
    train = np.array([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]])  # cosines 1, 0.6, 0.6 with the test example
    labels, test = np.array([0, 1, 1]), np.array([[1.0, 0.0]])
    assert neighbours.predict(train, labels, test, k=3).tolist() == [1]
    assert neighbours.predict(train, labels, test, k=3, temperature=0.1).tolist() == [0]
    # exp(0.4 / 1) = 1.49 is less than two votes: still outvoted.
    assert neighbours.predict(train, labels, test, k=3, temperature=1.0).tolist() == [1]


def test_more_neighbours_than_examples_is_an_error():
    with pytest.raises(UserError, match="ask for 1 to 3"):
        neighbours.predict(np.eye(3), np.arange(3), np.eye(3), k=4)
