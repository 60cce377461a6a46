"""The Vision Transformer of arXiv 2010.11929 and arXiv 2106.04560 as a Keras model."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError, nearest
from vit_tpu.layers import base, drop, remat, sharding, target
from vit_tpu.layers.block import Block, stacked_blocks
from vit_tpu.layers.head import Head, Representation
from vit_tpu.layers.norm import LayerNorm
from vit_tpu.layers.patches import PatchEmbedding, grid_of
from vit_tpu.layers.pooling import MapPool
from vit_tpu.layers.positions import PositionsAndTokens
from vit_tpu.models import variants
from vit_tpu.models.step import StepModel
from vit_tpu.optim.decay import Parameter

POOLS = ("tok", "gap", "map", "none")
REMATS = ("none", "block")


@keras.utils.register_keras_serializable(package="vit_tpu")
class ViT(StepModel):
    """Vision Transformer: `model(images)` gives logits, `model.encode(images)` tokens.

    Weights are float32. Under `mixed_bfloat16` and `mixed_float16` the patch embedding, the projections, the MLPs
    and the residual stream follow the policy; attention logits and softmax, every LayerNorm, the pooling and the
    head stay float32.

    Args:
      variant: a name such as "S/16" or "G/14" (see `models.VARIANTS`).
      image_size: side, or (height, width), in pixels; must divide by the patch size.
      num_classes: C of the logits; 0 for pooled features.
      pool: "tok" (class token), "gap" (mean over patches), "map" (attention pooling) or "none" (one output per token).
      posemb: "learn" or "sincos2d".
      channels: of the images.
      registers: extra learnt tokens that no pooling reads.
      dropout: rate after attention and in the MLP.
      drop_path: stochastic depth of the last block; earlier blocks get linearly less, the first none.
      layer_scale: initial value of a factor per channel on each branch, or None.
      head_bias_init: start of the classifier's bias.
      representation_size: width of a tanh layer before the classifier, or None.
      remat: "block" keeps only each block's input and computes the rest again for the gradient.
      scan: one traced block in a loop over stacked weights: same numbers, faster to compile; always rematerialises.
      gelu: "tanh" as in the papers, or "erf".
      epsilon: of the LayerNorms.
      norm_position: "before" or "after" the pooling, where the final LayerNorm acts (timm's `fc_norm` is "after").
      **overrides: width, depth, mlp_dim, num_heads, patch_size in place of the variant's.

    Raises:
      UserError: an unknown name, or sizes that do not divide; says what would.
    """

    def __init__(
        self,
        variant: str = "S/16",
        *,
        image_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        pool: str = "map",
        posemb: str = "learn",
        channels: int = 3,
        registers: int = 0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        head_bias_init: float = 0.0,
        representation_size: int | None = None,
        remat: str = "none",
        scan: bool = False,
        gelu: str = "tanh",
        epsilon: float = 1e-6,
        norm_position: str = "before",
        name: str | None = None,
        **overrides: Any,
    ):
        super().__init__(name=name or "vit")
        shape = override(variants.variant(variant), overrides)
        size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
        _check_choice("pool", pool, POOLS)
        _check_choice("remat", remat, REMATS)
        _check_choice("norm_position", norm_position, ("before", "after"))
        for rate_name, rate in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0.0 <= rate < 1.0:
                raise UserError(f"{rate_name}={rate} is not in [0, 1)")
        if num_classes < 0:
            raise UserError(f"num_classes={num_classes} is negative; 0 asks for features")
        self.settings = {
            "variant": variant, "image_size": size, "num_classes": num_classes, "pool": pool, "posemb": posemb,
            "channels": channels, "registers": registers, "dropout": dropout, "drop_path": drop_path,
            "layer_scale": layer_scale, "head_bias_init": head_bias_init, "representation_size": representation_size,
            "remat": remat, "scan": scan, "gelu": gelu, "epsilon": epsilon,
            "norm_position": norm_position, "name": self.name, **overrides,
        }  # fmt: skip
        self.variant, self.image_size, self.pool, self.scan = shape, size, pool, scan
        self.num_classes, self.channels = num_classes, channels
        grid = grid_of(size, shape.patch_size)
        self.num_patches = grid[0] * grid[1]
        self.embedding = PatchEmbedding(shape.width, shape.patch_size, channels, name="embedding")
        self.positions = PositionsAndTokens(grid, shape.width, posemb, pool == "tok", registers, name="positions")
        self.rates = [drop_path * i / max(shape.depth - 1, 1) for i in range(shape.depth)]
        self.blocks = [
            Block(
                shape.width, shape.num_heads, shape.mlp_dim, dropout=dropout, drop_path=rate, layer_scale=layer_scale,
                gelu=gelu, epsilon=epsilon, remat=remat == "block", name="blocks" if scan else f"block_{i}",
            )
            for i, rate in enumerate(self.rates[:1] if scan else self.rates)
        ]  # fmt: skip
        self.norm = LayerNorm(shape.width, epsilon, name="norm")
        self.map = None
        if pool == "map":
            self.map = MapPool(shape.width, shape.num_heads, shape.mlp_dim, gelu, epsilon, name="map")
        features = representation_size or shape.width
        self.pre_logits = Representation(shape.width, features, name="pre_logits") if representation_size else None
        self.head = Head(features, num_classes, head_bias_init, name="head") if num_classes else None
        for prefix, layer, stack in self._parts():
            layer.create_weights(prefix, stack)
        self._set_save_spec(tf.TensorSpec([None, *size, channels], tf.float32))
        self.built = True

    def _parts(self) -> list[tuple[str, base.ParamLayer, int | None]]:
        """(path prefix, layer, stacked depth) in the order of the parameters."""
        parts: list[tuple[str, base.ParamLayer | None, int | None]] = [
            ("embedding", self.embedding, None), ("", self.positions, None),
        ]  # fmt: skip
        if self.scan:
            parts.append(("blocks", self.blocks[0], self.variant.depth))
        else:
            parts += [(f"blocks/{i}", block, None) for i, block in enumerate(self.blocks)]
        parts += [("norm", self.norm, None), ("map", self.map, None)]
        parts += [("pre_logits", self.pre_logits, None), ("head", self.head, None)]
        return [(prefix, layer, stack) for prefix, layer, stack in parts if layer is not None]

    def parameters(self) -> list[Parameter]:
        """Returns what there is to train, by path: the basis of decay groups, checkpoints, weight files and tables."""
        found = []
        for prefix, layer, stack in self._parts():
            specs, offset = layer.specs(), int(stack is not None)
            depth = self._depth_of(prefix)
            part = "head" if prefix == "head" else "body"
            for path, variable in layer.params.items():
                full = f"{prefix}/{path}" if prefix else path
                spec = specs[path]
                split = None if spec.split is None else spec.split + offset
                found.append(Parameter(full, variable, spec.kind, part, depth, stacked=stack is not None, split=split))
        return found

    def _depth_of(self, prefix: str) -> int:
        if prefix in ("embedding", ""):
            return 0
        if prefix.startswith("blocks"):
            return 1 if self.scan else int(prefix.split("/")[1]) + 1
        return self.variant.depth + 1

    def call(self, images: tf.Tensor, training: bool = False, seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns float32 logits [B, C] (features [B, D] if num_classes is 0) of images [B, H, W, C] in [-1, 1].

        Args:
          images: any float dtype.
          training: switches dropout and stochastic depth on.
          seed: int32 [2]; the same seed drops the same units. Drawn afresh if not given.
        """
        return self._head(self.encode(images, training=training, seed=seed))

    def encode(
        self,
        images: tf.Tensor,
        training: bool = False,
        seed: tf.Tensor | None = None,
        record: dict[str, tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns the tokens after the final LayerNorm: float32 [B, prefix + N, D], the class token and registers
        first.

        With norm_position="after" they are what the pooling reads: not yet normalised.

        Args:
          images, training, seed: as in `call`.
          record: if given, filled with intermediates by big_vision's names (not with scan=True).
        """
        images = sharding.batch(tf.convert_to_tensor(images))
        self._check_images(images)
        if not training or not self._random:
            seed = None
        elif seed is None:
            seed = tf.random.uniform([2], minval=0, maxval=2**31 - 1, dtype=tf.int32)
        x = self._embedded(images)
        if record is not None:
            record["stem"] = x
        x = target.settled(self.positions.forward(_used(self.positions), x))
        if record is not None:
            record["with_posemb"] = x[:, self.positions.num_prefix :]
        if seed is not None:
            x = drop.dropout(x, self.settings["dropout"], drop.fold(seed, 2**20))
        if self.scan:
            x = stacked_blocks(self.blocks[0], self.variant.depth, x, seed, self.rates)
        else:
            x = self._unrolled(x, seed, record)
        x = self._norm(x, "before")
        if record is not None:
            record["encoded"] = x
        return x

    def _embedded(self, images: tf.Tensor) -> tf.Tensor:
        params = _used(self.embedding)
        if target.on_tpu() and (self.scan or self.settings["remat"] == "block"):
            # The gradient reads the images as they came: laid out for the product they take up to four times the room.
            return remat.rematerialised(lambda p, x, _: self.embedding.forward(p, x), params, images)
        return self.embedding.forward(params, images)

    def _unrolled(self, x: tf.Tensor, seed: tf.Tensor | None, record: dict[str, tf.Tensor] | None) -> tf.Tensor:
        for i, block in enumerate(self.blocks):
            block_seed = None if seed is None else drop.fold(seed, i)
            with tf.name_scope(f"blocks/{i}"):
                if record is None:
                    x = block.run(block.values(), x, block_seed, block.drop_path)
                else:
                    found: dict[str, tf.Tensor] = {}
                    x = block.forward(block.values(), x, seed=block_seed, drop_path=block.drop_path, record=found)
                    record.update({f"encoder/block{i:02d}/{name}": value for name, value in found.items()})
        return x

    def pooled(self, tokens: tf.Tensor) -> tf.Tensor:
        """Returns what the classifier reads: float32 [B, D] of `encode`'s tokens ([B, N, D] for pool="none")."""
        return self._norm(self._pool(tokens), "after")

    def _pool(self, tokens: tf.Tensor) -> tf.Tensor:
        if self.pool == "tok":
            return tokens[:, 0]
        patches = tokens[:, self.positions.num_prefix :]
        if self.map is not None:
            return self.map.forward(_used(self.map), patches)
        return tf.reduce_mean(patches, axis=1) if self.pool == "gap" else patches

    def _norm(self, x: tf.Tensor, position: str) -> tf.Tensor:
        """The final LayerNorm if it acts here; float32 either way."""
        if position == self.settings["norm_position"]:
            return self.norm.forward(_used(self.norm), x)
        return tf.cast(x, tf.float32)

    def _head(self, tokens: tf.Tensor) -> tf.Tensor:
        x = self.pooled(tokens)
        if self.pre_logits is not None:
            x = self.pre_logits.forward(_used(self.pre_logits), x)
        return x if self.head is None else self.head.forward(_used(self.head), x)

    @property
    def _random(self) -> bool:
        return self.settings["dropout"] > 0.0 or self.settings["drop_path"] > 0.0

    def _check_images(self, images: tf.Tensor) -> None:
        expected = (*self.image_size, self.channels)
        if tuple(images.shape[1:]) != expected:
            raise UserError(
                f"images of shape {tuple(images.shape)} do not fit a model built for [B, "
                f"{', '.join(map(str, expected))}]: "
                f"resize them, or build the model with image_size={tuple(images.shape[1:3])} and "
                f"channels={images.shape[-1]}"
            )
        if not images.dtype.is_floating:
            raise UserError(f"images are {images.dtype.name}; the model reads floats in [-1, 1]: image / 127.5 - 1")

    def flops(self) -> int:
        """Returns the FLOPs of one image's forward pass (see `models.flops`)."""
        return variants.flops(
            self.variant,
            image_size=self.image_size,
            num_classes=self.num_classes,
            pool=self.pool,
            channels=self.channels,
            registers=self.settings["registers"],
            representation_size=self.settings["representation_size"],
        )

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        last = self.num_classes or self.settings["representation_size"] or self.variant.width
        middle = [self.num_patches] if self.pool == "none" else []
        return tf.TensorShape([input_shape[0], *middle, last])

    def get_config(self) -> dict[str, Any]:
        return dict(self.settings)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ViT:
        return cls(**config)


def _used(layer: base.ParamLayer) -> base.Params:
    """A layer's own weights as it computes with them."""
    return layer.gathered(layer.values())


def override(shape: variants.Variant, overrides: dict[str, Any]) -> variants.Variant:
    """Returns `shape` with some of width, depth, mlp_dim, num_heads, patch_size replaced; None means as it is."""
    names = [field.name for field in dataclasses.fields(variants.Variant)]
    for name, value in overrides.items():
        if name not in names:
            raise UserError(f"ViT has no argument {name!r}{nearest(name, [*names, *_ARGUMENTS])}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{name}={value!r} is not a positive whole number")
    return dataclasses.replace(shape, **{name: value for name, value in overrides.items() if value is not None})


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f'{name}="{value}"{nearest(str(value), choices)} is not one of {", ".join(choices)}')


_ARGUMENTS = (
    "image_size", "num_classes", "pool", "posemb", "channels", "registers", "dropout", "drop_path", "layer_scale",
    "head_bias_init", "representation_size", "remat", "scan", "gelu", "epsilon", "norm_position",
)  # fmt: skip
