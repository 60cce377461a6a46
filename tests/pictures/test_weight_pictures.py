"""Filters and positions as pictures: checked on weights whose structure is known."""

import numpy as np

import vit_tpu
from vit_tpu.pictures import weights

SETTINGS = {"width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 2, "num_classes": 2, "pool": "gap"}


def test_strongest_filter_is_the_direction_that_varies_most():
    model = vit_tpu.ViT("Ti/4", image_size=8, **SETTINGS)
    random = np.random.default_rng(0)
    edge = np.zeros((4, 4, 3))
    edge[:, 2:] = 1.0  # dark left, bright right
    stripe = np.zeros((4, 4, 3))
    stripe[::2] = 9.0  # in all filters alike: strong, but it does not vary
    kernel = 0.01 * random.normal(size=(4, 4, 3, 16)) + edge[..., None] * random.normal(size=16) + stripe[..., None]
    model.embedding.params["kernel"].assign(kernel)
    first = weights.filters(model)[0].astype(float)
    first = first if first[0, 3].mean() > first[0, 0].mean() else 255 - first
    assert first[:, 2:].min() > 200 and first[:, :2].max() < 55
    assert weights.filters(model).shape == (16, 4, 4, 3)  # no more than width


def test_similarity_of_positions_is_their_cosine():
    model = vit_tpu.ViT("Ti/4", image_size=(8, 12), **SETTINGS)
    table = np.zeros((1, 6, 16), np.float32)
    table[0, 0, 0], table[0, 1, 0], table[0, 5, 1] = 2.0, -3.0, 1.0
    model.positions.params["posemb"].assign(table)
    similar = weights.position_similarity(model)
    assert similar.shape == (2, 3, 2, 3)
    assert similar[0, 0, 0, 0] == 1.0 and similar[0, 0, 0, 1] == -1.0 and similar[0, 0, 1, 2] == 0.0


def test_fixed_positions_have_no_picture():
    model = vit_tpu.ViT("Ti/4", image_size=8, posemb="sincos2d", **SETTINGS)
    assert weights.position_similarity(model) is None and weights.similarity_sheet(model) is None


def test_sheets_become_pixels():
    model = vit_tpu.ViT("Ti/4", image_size=(32, 48), **SETTINGS)
    for figure in (weights.filter_sheet(model), weights.similarity_sheet(model)):
        drawn = weights.pixels(figure)
        assert drawn.dtype == np.uint8 and drawn.shape[-1] == 3 and drawn.std() > 5
