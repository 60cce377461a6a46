"""Resizing against the stored numbers of big_vision, PyTorch and timm, and by hand."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.weights import resample

TORCH = np.load(pathlib.Path(__file__).parents[1] / "data" / "weights" / "torch_outputs.npz")


@pytest.mark.parametrize("case", ["4to6", "4to2", "14to24", "16to37", "7to12"])
def test_bilinear_equals_the_reference_with_corners_aligned(refs, case):
    file = refs("resample_posemb.npz")
    old, new = (int(side) for side in case.split("to"))
    got = resample.posemb(file[f"{case}/old"], (old, old), (new, new), "bilinear")
    np.testing.assert_allclose(got, file[f"{case}/new"], atol=1e-5)
    for other in ("bilinear_antialias", "bicubic", "bicubic_antialias"):
        assert np.abs(resample.posemb(file[f"{case}/old"], (old, old), (new, new), other) - got).max() > 1e-2


@pytest.mark.parametrize("kernel", ["bicubic", "bicubic_antialias"])
@pytest.mark.parametrize("case", [((4, 4), (6, 6)), ((7, 7), (3, 5)), ((5, 5), (12, 4))])
def test_bicubic_equals_pytorch(kernel, case):
    (old, new), key = case, "resize/{}x{}to{}x{}".format(*case[0], *case[1])
    got = resample.posemb(TORCH[f"{key}/table"], old, new, kernel)
    np.testing.assert_allclose(got, TORCH[f"{key}/{kernel}"], atol=1e-5)


@pytest.mark.parametrize("kernel", list(resample.KERNELS))
def test_constant_grid_stays_constant_and_the_same_grid_is_untouched(kernel):
    np.testing.assert_allclose(resample.posemb(np.full((1, 15, 4), 3.0), (3, 5), (7, 2), kernel), 3.0, atol=1e-6)
    table = np.random.default_rng(0).normal(size=(1, 15, 4)).astype(np.float32)
    assert resample.posemb(table, (3, 5), (3, 5), kernel) is table


def test_bilinear_by_hand_on_a_grid_that_is_not_square():
    table = np.array([[0.0], [1.0], [10.0], [11.0]], np.float32)[None]  # 2x2
    got = resample.posemb(table, (2, 2), (2, 3), "bilinear")[0, :, 0]
    np.testing.assert_allclose(got, [0, 0.5, 1, 10, 10.5, 11])
    got = resample.posemb(table, (2, 2), (3, 2), "bilinear")[0, :, 0]
    np.testing.assert_allclose(got, [0, 1, 5, 6, 10, 11])


def test_antialiased_linear_counts_every_old_pixel():
    row = resample.KERNELS["bilinear_antialias"](4, 2)[0]  # a triangle of half-width 2 around 0.5
    np.testing.assert_allclose(row, np.array([0.75, 0.75, 0.25, 0.0]) / 1.75)


@pytest.mark.parametrize("old, new", [((14, 14), (16, 16)), ((16, 16), (7, 9))])
def test_antialiased_linear_equals_tensorflows(old, new):
    table = np.random.default_rng(0).normal(size=(1, old[0] * old[1], 4)).astype(np.float32)
    expected = tf.image.resize(table.reshape(1, *old, 4), new, "bilinear", antialias=True).numpy().reshape(1, -1, 4)
    np.testing.assert_allclose(resample.posemb(table, old, new, "bilinear_antialias"), expected, atol=1e-5)


def test_unknown_kernel_names_the_nearest():
    with pytest.raises(UserError, match='did you mean "bicubic"'):
        resample.posemb(np.zeros((1, 4, 1)), (2, 2), (3, 3), "bicubik")


@pytest.mark.parametrize("size", [6, 8])
def test_patch_resize_equals_timm(size):
    got = resample.patch_kernel(TORCH["patch/kernel"].transpose(2, 3, 1, 0), size)
    np.testing.assert_allclose(got.transpose(3, 2, 0, 1), TORCH[f"patch/{size}"], atol=1e-5)


def test_patch_resize_keeps_the_token_of_an_enlarged_patch():
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(4, 4, 3, 2)).astype(np.float32), rng.normal(size=(4, 4, 3))
    matrix = resample.half_pixel_matrix(4, 8, resample.triangle, 1, antialias=False, clamp=True)
    enlarged = np.einsum("ir,js,rsc->ijc", matrix, matrix, patch)
    new = resample.patch_kernel(kernel, 8)
    token = np.einsum("rsc,rscd->d", patch, kernel)
    np.testing.assert_allclose(np.einsum("ijc,ijcd->d", enlarged, new), token, atol=1e-5)


@pytest.mark.parametrize("rows, token", [(196, 0), (197, 1), (256, 0), (257, 1), (1370, 1), (1369, 0)])
def test_class_token_row_is_decided_by_exact_squares(rows, token):
    assert resample.prefix_rows(rows, (0, 1)) == token


def test_prefix_rows_that_fit_no_or_two_ways_are_an_error():
    with pytest.raises(UserError, match="none fit"):
        resample.prefix_rows(195, (0, 1))
    with pytest.raises(UserError, match="several fit.*source_grid"):
        resample.prefix_rows(9, (0, 5))  # 9 = 3x3, 9 - 5 = 2x2
    assert resample.prefix_rows(9, (0, 5), patches=4) == 5
