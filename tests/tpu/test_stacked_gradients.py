"""Gradients that each loop of a stack collects are told from activations."""

from vit_tpu.tpu import report


def pieces(name, shape):
    return report._pieces({"role": "parameters", "name": name, "shape": shape})


def test_gradients_of_some_of_the_stacked_blocks_are_known_by_their_shape():
    found = pieces("blocks/mlp/dense1/kernel", [5, 64, 128])
    assert sorted(found) == [[2, 64, 128], [3, 64, 128], [4, 64, 128], [5, 64, 128]]


def test_weights_of_one_block_have_one_shape():
    for name in ("blocks/0/mlp/dense1/kernel", "blocks/11/mlp/dense1/kernel", "map/mlp/dense1/kernel"):
        assert pieces(name, [64, 128]) == [[64, 128]]
