"""Optimizers that update each number separately, by PyTorch's formulas: SGD, Adam, AdamW, Adagrad, RMSprop."""

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


@keras.saving.register_keras_serializable("allstep")
class SGD(Optimizer):
    """SGD: m = momentum * m + g + decay * w; w = w - lr * m, with g + momentum * m for m under Nesterov.

    Sutskever et al. 2013 in torch's form, one fused kernel a variable; Keras' own has the learning rate in m.
    """

    def __init__(self, learning_rate: float = 0.0, momentum: float = 0.0, nesterov: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, **kwargs)
        self.momentum, self.nesterov = momentum, nesterov
        self.slot_names = ("momentum",) if momentum else ()

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        self.move(self.with_decay(gradient, variable), variable, learning_rate)

    def move(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """Take a step with a gradient that includes the decay."""
        rate = tf.cast(learning_rate, variable.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.slot("momentum", variable).handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict:
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov}


class AdamKernel(Optimizer):
    """Base of optimizers that keep Adam's two moments, updated by one fused kernel per variable."""

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
    slot_names = ("exp_avg", "exp_avg_sq")

    def rates(self, learning_rate: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the learning rate, the factor that corrects the bias of both moments, and the kernel's epsilon.

        The kernel divides by sqrt(v) + epsilon where the paper has sqrt(v / correction_2) + epsilon. Its own correction
        1 - beta^t has only 3 digits in float32 at first, so this one is computed in float64, from beta as the weight's
        type represents it.
        """
        step, betas = tf.cast(self.num_steps + 1, tf.float64), (self.BETA_1, self.BETA_2)
        correction_1, correction_2 = (1 - tf.pow(tf.cast(tf.constant(beta, dtype), tf.float64), step) for beta in betas)
        root = tf.sqrt(correction_2)
        return learning_rate, tf.cast(root / correction_1, dtype), tf.cast(self.EPSILON * root, dtype)

    def apply_adam(
        self, gradient: tf.Tensor, variable: tf.Variable, *, moved: tf.Tensor, rate: tf.Tensor, epsilon: tf.Tensor
    ) -> None:
        """Take Adam's step of the variable with the handle `moved`, with the moments of `variable`."""
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyAdam(
            var=moved,
            m=self.slot("exp_avg", variable).handle,
            v=self.slot("exp_avg_sq", variable).handle,
            beta1_power=tf.zeros((), dtype),
            beta2_power=tf.zeros((), dtype),
            lr=rate,
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            epsilon=epsilon,
            grad=gradient,
        )


@keras.saving.register_keras_serializable("allstep")
class Adam(AdamKernel):
    """Adam (Kingma and Ba 2015, algorithm 1) with the decay in the gradient, or `decoupled` as AdamW.

    In AdamW (Loshchilov and Hutter 2019) the weight itself decays by lr * decay. Keras' own optimizers add epsilon
    before they correct the bias.
    """

    def __init__(self, learning_rate: float = 0.0, decoupled: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, **kwargs)
        self.decoupled = decoupled

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> None:
        rate, correction, epsilon = (tf.cast(number, variable.dtype) for number in learning_rate)
        if not self.decoupled:
            gradient = self.with_decay(gradient, variable)
        elif decay := self.decay_of(variable):
            variable.assign_sub(rate * decay * variable)
        self.apply_adam(gradient, variable, moved=variable.handle, rate=rate * correction, epsilon=epsilon)

    def get_config(self) -> dict:
        return {**super().get_config(), "decoupled": self.decoupled}


@keras.saving.register_keras_serializable("allstep")
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011) in torch's form: s = s + g^2; w = w - lr * g / (sqrt(s) + 1e-10).

    The decay is in g. One fused kernel a variable. Keras' own starts with s = 0.1, and has 1e-7 under the root.
    """

    EPSILON = 1e-10
    slot_names = ("sum_of_squares",)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyAdagradV2(
            var=variable.handle,
            accum=self.slot("sum_of_squares", variable).handle,
            lr=tf.cast(learning_rate, variable.dtype),
            epsilon=tf.constant(self.EPSILON, variable.dtype),
            grad=self.with_decay(gradient, variable),
        )


@keras.saving.register_keras_serializable("allstep")
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012) in torch's form: s = 0.99 * s + 0.01 * g^2; w = w - lr * g / (sqrt(s) + 1e-8).

    The decay is in g. Keras' own has 0.9, and epsilon = 1e-7 under the root.
    """

    RHO, EPSILON = 0.99, 1e-8
    slot_names = ("square_avg",)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        gradient, mean_of_squares = self.with_decay(gradient, variable), self.slot("square_avg", variable)
        mean_of_squares.assign_add((1 - self.RHO) * (tf.square(gradient) - mean_of_squares))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle,
            alpha=tf.cast(learning_rate, variable.dtype),
            delta=gradient / (tf.sqrt(mean_of_squares) + self.EPSILON),
        )
