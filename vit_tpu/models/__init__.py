"""The model and its named shapes."""

from vit_tpu.models.variants import VARIANTS, Variant, flops, variant

__all__ = ["VARIANTS", "Variant", "flops", "variant"]
