"""The training step: the one place where loss, scaling, accumulation, averaging, clipping and update meet.

scaled loss -> gradients of each micro-batch -> sum over micro-batches and replicas -> unscale and divide by the
number of examples -> finite check -> clip by global norm -> update -> EMA. A step whose gradient is not finite
changes no weight, no optimizer state and no schedule. After a non-finite loss no later step changes anything, until
the caller looks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import losses
from vit_tpu import metrics as metric_kinds
from vit_tpu.errors import UserError
from vit_tpu.layers import drop, sharding
from vit_tpu.mesh import Mesh
from vit_tpu.models import accept, guard, watch
from vit_tpu.optim import decay
from vit_tpu.optim.base import GroupedOptimizer
from vit_tpu.optim.ema import Ema
from vit_tpu.optim.loss_scale import LossScale

# AutoGraph would read and rewrite the source of everything below: slower to trace, and nothing here needs it.
_as_written = tf.autograph.experimental.do_not_convert


class StepModel(watch.WaitingModel):
    """A Keras model trained by the rules above through `compile` and `fit`.

    A subclass offers `parameters() -> list[Parameter]` and `call(images, training, seed)` giving float32 logits.
    """

    def parameters(self) -> list[decay.Parameter]:
        raise NotImplementedError

    def compile(
        self, optimizer: Any = "adamw", loss: Any = "softmax", metrics: Sequence[Any] = ("accuracy",), *,
        grad_clip_norm: float | None = None, accumulation_steps: int = 1, ema: float | Ema | None = None,
        steps_per_execution: int = 1, jit_compile: bool | None = None, seed: int = 0, freeze: Sequence[str] = (),
        layer_decay: float | None = None, max_skipped: int = 50, check_numerics: bool = False,
        run_eagerly: bool = False, mesh: Mesh | None = None, record_updates: bool = False,
    ):  # fmt: skip
        """Says how to train.

        Args:
          optimizer: one of `vit_tpu.optim` or its name ("lamb", "adafactor", "adamw", "sgd").
          loss: "softmax", "sigmoid" or an object of `vit_tpu.losses`.
          metrics: "accuracy", "top5" or tf_keras metrics; weighted by the examples' 0/1 weights.
          grad_clip_norm: largest global norm of the averaged gradient, or None.
          accumulation_steps: micro-batches a batch is cut into, inside the compiled step.
          ema: decay of a float32 moving average of the weights, an `optim.Ema` with other settings (decay=None: the
            uniform mean of Polyak), or None for no average.
          steps_per_execution: steps between two returns to Python.
          jit_compile: XLA for the whole step on one device, for forward and backward on several (TensorFlow cannot
            compile a step whose variables live on other devices); None chooses: on for GPUs, off on CPU and TPU
            (which always compiles).
          seed: start of dropout and stochastic depth.
          freeze: globs of parameter paths that are not trained ("embedding/*", or "body").
          layer_decay: factor on the learning rate from each block to the one before it, or None.
          max_skipped: consecutive steps without a finite gradient after which training stops with an error.
          check_numerics: take a gradient that is not finite for a loss that is not finite: the run stops at that step.
            Not where a dynamic loss scale tries out how large it may be.
          run_eagerly: plain Python steps, for debugging.
          mesh: cores that one copy of the model is divided over, or None. The step is annotated for them; only a TPU's
            runtime and the planner divide it.
          record_updates: keep how far the last applied update moved each parameter (`movement`); two sums over the
            weights in every step.

        Raises:
          UserError: what cannot work together; says what would.
        """
        accept.check_positive(
            accumulation_steps=accumulation_steps, steps_per_execution=steps_per_execution, max_skipped=max_skipped
        )
        self.compiled: dict[str, Any] = {
            "grad_clip_norm": grad_clip_norm, "accumulation_steps": accumulation_steps, "ema": ema, "seed": seed,
            "steps_per_execution": steps_per_execution, "jit_compile": jit_compile, "freeze": list(freeze),
            "layer_decay": layer_decay, "max_skipped": max_skipped, "check_numerics": check_numerics,
            "run_eagerly": run_eagerly,
        }  # fmt: skip
        optimizer = accept.accept_optimizer(optimizer, self.dtype_policy.name)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if grad_clip_norm is not None and grad_clip_norm <= 0:
            raise UserError(f"grad_clip_norm={grad_clip_norm} is not positive; leave it out for no clipping")
        if grad_clip_norm is not None and inner.global_clipnorm is not None:
            raise UserError(
                f"the gradient would be clipped twice: compile(grad_clip_norm={grad_clip_norm}) and the optimizer's "
                f"global_clipnorm={inner.global_clipnorm}; keep the first"
            )
        self.traced: tuple[str, ...] = ()
        self.jit = accept.choose_jit(jit_compile, self.distribute_strategy)
        replicas = self.distribute_strategy.num_replicas_in_sync
        super().compile(
            optimizer=optimizer, loss=losses.get(loss), weighted_metrics=[],
            steps_per_execution=steps_per_execution, run_eagerly=run_eagerly,
            jit_compile=self.jit and replicas == 1 and not run_eagerly,
        )  # fmt: skip
        self.distribute_reduction_method = "first"  # every replica returns the same figures; Keras would add them up
        parameters = self.parameters()
        self.groups = tuple(decay.resolve(parameters, freeze=freeze, layer_decay=layer_decay))
        frozen = {path for group in self.groups if group.frozen for path in group.paths}
        self.trained = tuple(parameter for parameter in parameters if parameter.path not in frozen)
        # Settings that a reloaded optimizer brings along hold, unless the caller asks for others.
        inner.assign_groups(self.groups, keep_saved=not freeze and layer_decay is None)
        variables = [parameter.variable for parameter in self.trained]
        self.mesh = mesh
        layouts = {} if mesh is None else sharding.layouts(self.trained, mesh)
        inner.layouts = inner._no_dependency(layouts)
        with self.distribute_strategy.scope():
            inner.build(variables)
            self.counters = guard.Counters()
            self.loss_tracker = keras.metrics.Mean("loss", dtype="float32")
            self.examples = metric_kinds.Count()
            self.step_metrics = [metric_kinds.get(metric) for metric in metrics]
            self.averages = None
            if ema is not None:
                settings = ema if isinstance(ema, Ema) else Ema(decay=ema)
                # A new one, so that compiling again starts afresh.
                self.averages = Ema(settings.decay, settings.warmup, settings.start_step)
                self.averages.layouts = self.averages._no_dependency(list(layouts.values()))
                self.averages.build(variables)
            self.movement = watch.Updates([p.path for p in self.trained]) if record_updates else None
        self.split_jit = None
        if self.jit and replicas > 1 and not run_eagerly:
            self.split_jit = tf.function(self._gradients, jit_compile=True, reduce_retracing=True)

    def fit(self, *args: Any, callbacks: Any = None, **kwargs: Any) -> keras.callbacks.History:
        """Keras' `fit`, which stops with an error on a non-finite loss or when every step is skipped."""
        callbacks = list(
            callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks or []
        )
        guard.refuse_useless(callbacks)
        if not any(isinstance(callback, guard.StepGuard) for callback in callbacks):
            callbacks.append(guard.StepGuard())
        with guard.plain_errors():
            return super().fit(*args, callbacks=callbacks, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `evaluate`; "count" is the number of examples that were not padding."""
        with guard.plain_errors():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `predict`: float32 logits of every image."""
        with guard.plain_errors():
            return super().predict(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with guard.plain_errors():
            return super().__call__(*args, **kwargs)

    @property
    def inner_optimizer(self) -> GroupedOptimizer:
        """The optimizer itself, without its loss scale."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        # Keras' own container would reshape labels and ignore the weights of padding.
        return [self.loss_tracker, self.examples, *self.step_metrics] if self._is_compiled else []

    @_as_written
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """One step on a batch (images [B, H, W, C], labels[, weights [B]]); returns the metrics and the step's own
        figures."""
        parts = accept.unpack(data)
        self.traced = accept.note_trace(self.traced, *parts[:2])
        with sharding.over(self.mesh):
            return self._train_step(*(sharding.batch(part) for part in parts))

    def _train_step(self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        optimizer, counters = self.optimizer, self.counters
        scale = optimizer.loss_scale if isinstance(optimizer, LossScale) else None
        seed = drop.fold(tf.constant([self.compiled["seed"], 0]), tf.cast(counters.steps, tf.int64))
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        if replicas > 1:
            seed = drop.fold(seed, context.replica_id_in_sync_group)
        gradients_of = self.split_jit or self._gradients
        gradients, total, count, logits = gradients_of(images, labels, weights, scale, seed)
        if replicas > 1:
            *gradients, total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, total, count])
        # Gradients so far are sums over all examples divided by one replica's static batch; one factor makes them the
        # mean, unscaled.
        factor = accept.static_batch(images) / tf.maximum(count, 1.0)
        if scale is not None:
            factor = factor / scale
        loss = total / tf.maximum(count, 1.0)
        squares = tf.stack([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
        norm = tf.sqrt(tf.reduce_sum(squares)) * factor
        finite, latched = tf.math.is_finite(norm), counters.latched()
        ok = tf.reduce_all([finite, tf.math.is_finite(loss), tf.logical_not(latched), count > 0])
        clip = self.compiled["grad_clip_norm"]
        if clip is not None:
            factor = factor * tf.minimum(1.0, clip / norm)
        pairs = [(gradient * factor, p.variable) for gradient, p in zip(gradients, self.trained)]
        extra = {"frozen": latched} if isinstance(optimizer, LossScale) else {}
        before = [] if self.movement is None else self._weights_as_state()
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, ok=ok, **extra)
        if self.movement is not None:
            self.movement.record(before, self._weights_as_state(), ok)
        if self.averages is not None:
            self.averages.update(ok)
        strict = self.compiled["check_numerics"] and not (isinstance(optimizer, LossScale) and optimizer.dynamic)
        counters.update(loss, ok, squares, strict)
        # Every replica holds the global loss; each adds its own share of the weight so that the sum over replicas is
        # right.
        self.loss_tracker.update_state(tf.where(tf.math.is_finite(loss), loss, 0.0), tf.reduce_sum(weights))
        for metric in self.step_metrics:
            metric.update_state(labels, logits, weights)
        results = {metric.name: metric.result() for metric in self.metrics if metric is not self.examples}
        return {**results, "step_loss": loss, "grad_norm": norm}

    @_as_written
    def _gradients(self, images: Any, labels: Any, weights: Any, scale: Any, seed: tf.Tensor) -> tuple:
        """Returns gradients of the scaled loss sum / static batch, the loss sum, the example count and the logits
        [B, C]."""
        micro = self.compiled["accumulation_steps"]
        batch = accept.static_batch(images)
        if batch % micro:
            near = [str(size) for size in (batch // micro * micro, (batch // micro + 1) * micro) if size]
            raise UserError(
                f"a batch of {batch} a replica does not divide into accumulation_steps={micro} equal parts: "
                f"use {' or '.join(near)}"
            )
        if micro == 1:
            return self._micro_gradients(images, labels, weights, scale, seed, batch)
        parts = [tf.reshape(part, [micro, batch // micro, *part.shape[1:]]) for part in (images, labels, weights)]
        parts = [sharding.constrain(part, (None, "data")) for part in parts]
        zeros = self._as_state([tf.zeros(p.variable.shape) for p in self.trained])
        spec = tf.TensorArray(tf.float32, micro, element_shape=[batch // micro, *self.compute_output_shape([1])[1:]])

        def body(i, sums, total, count, outputs):
            image, label, weight = (part[i] for part in parts)
            part_seed = drop.fold(seed, i + 1)
            gradients, part_total, part_count, logits = self._micro_gradients(
                image, label, weight, scale, part_seed, batch
            )
            sums = self._as_state([a + b for a, b in zip(sums, gradients)])
            return i + 1, sums, total + part_total, count + part_count, outputs.write(i, logits)

        start = [0, zeros, tf.constant(0.0), tf.constant(0.0), spec]
        _, sums, total, count, outputs = tf.while_loop(lambda i, *_: i < micro, body, start)
        logits = outputs.stack()
        return sums, total, count, tf.reshape(logits, [batch, *logits.shape[2:]])

    def _micro_gradients(
        self, images: Any, labels: Any, weights: Any, scale: Any, seed: tf.Tensor, batch: int
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor]:
        variables = [p.variable for p in self.trained]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            logits = self.call(images, training=True, seed=seed)
            each = self.loss.call(labels, logits)
            # Padding (weight 0) must not spread a NaN of its own.
            total = tf.reduce_sum(tf.where(weights > 0, each * weights, 0.0))
            target = total / batch
            if scale is not None:
                target = target * scale
        gradients = tape.gradient(target, variables, unconnected_gradients="zero")
        gradients = self._as_state([tf.cast(g, tf.float32) for g in gradients])
        return gradients, total, tf.reduce_sum(weights), logits

    def _as_state(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """On a mesh each core holds the share of a gradient whose weights it updates."""
        layouts = self.inner_optimizer.layouts
        return [sharding.as_state(g, layouts.get(p.path)) for g, p in zip(gradients, self.trained)]

    def _weights_as_state(self) -> list[tf.Tensor]:
        """The trained weights; on a mesh each core reads its share."""
        layouts = self.inner_optimizer.layouts
        stored = [sharding.as_stored(tf.convert_to_tensor(p.variable), layouts.get(p.path)) for p in self.trained]
        return self._as_state(stored)

    @_as_written
    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Adds a batch (images, labels[, weights]) to the metrics; "count" is the number of real examples so far."""
        with sharding.over(self.mesh):
            return self._test_step(*(sharding.batch(part) for part in accept.unpack(data)))

    def _test_step(self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = self(images, training=False)
        each = self.loss.call(labels, logits)
        self.loss_tracker.update_state(tf.where(weights > 0, each, 0.0), weights)
        self.examples.update_state(weights)
        for metric in self.step_metrics:
            metric.update_state(labels, logits, weights)
        return {metric.name: metric.result() for metric in self.metrics}

    @functools.cached_property
    def logits(self) -> Any:
        """A compiled function of images [B, H, W, C] giving logits, for loops of one's own; traced once a shape."""
        return tf.function(functools.partial(self, training=False), reduce_retracing=True, autograph=False)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the `with` block the model holds the moving average; afterwards exactly the trained weights again."""
        if self.averages is None:
            raise UserError("this model keeps no average: compile(ema=0.9999) makes one")
        with self.averages.averaged([p.variable for p in self.trained]):
            yield

    def compilations(self) -> int:
        """Returns how often the training step was traced, and so compiled; one is right."""
        return 0 if self.train_tf_function is None else self.train_tf_function.experimental_get_tracing_count()

    def get_compile_config(self) -> dict[str, Any]:
        return {}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """A loaded model is not compiled: say again how to train it."""
