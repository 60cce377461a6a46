"""Pretrained weights of other frameworks in, and ours out."""

from vit_tpu.weights.converting import convert, describe
from vit_tpu.weights.io import load_weights, save_weights
from vit_tpu.weights.report import LoadReport, SaveReport

__all__ = ["LoadReport", "SaveReport", "convert", "describe", "load_weights", "save_weights"]
