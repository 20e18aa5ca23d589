"""Observe gradients in TensorFlow: as a tape computes them, and as a Keras optimizer applies them.

Every optimizer of Keras 3 on TensorFlow passes the gradients that it applies through `_all_reduce_sum_gradients`, in
which tf.distribute sums them over its replicas (as of Keras 3.15).
"""

import math
import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from allstep.commands.prove.observer.keras_models import call_with, native, some_values
from allstep.commands.prove.observer.observer import Observer, owner_of, replace
from allstep.commands.prove.observer.tf_distribute import current_replica, local, sent
from allstep.commands.prove.observer.values import digest, finite, projections
from allstep.commands.prove.records import Gradient, Sent, Step


class Gradients:
    """Gradients of one process."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._made: dict[int, tuple[Any, dict[int, Any]]] = {}  # by replica: a loss, and its gradients by variable
        self._num_steps: dict[int, dict[int, int]] = defaultdict(dict)  # by replica and optimizer
        self._pending: set[int] = set()  # variables whose gradients are not applied yet
        self._adds_up = False  # gradients of several tapes

    def note_local(self, loss: Any, variables: Any, gradients: Any) -> None:
        """Keep the gradients of a tape until an optimizer applies them."""
        sent.clear()
        pairs = zip(tf.nest.flatten(variables), tf.nest.flatten(gradients), strict=False)
        made = {id(native(one)): gradient for one, gradient in pairs if gradient is not None and not _is_local(one)}
        self._made[current_replica()] = next(iter(tf.nest.flatten(loss)), None), made
        self._adds_up = not self._pending.isdisjoint(made)
        self._pending |= made.keys()

    def observe(self, optimizer: keras.Optimizer, grads_and_vars: Any) -> None:
        """Make the step that is being traced or run record the gradients that it applies."""
        pairs = [(one, variable) for one, variable in grads_and_vars if one is not None and not _is_local(variable)]
        variables = [variable for _, variable in pairs]
        names = [f"{variable.name.partition(':')[0]} {index}" for index, variable in enumerate(variables)]
        replica = current_replica()
        loss, made = self._made.get(replica, (None, {}))
        loss = loss if _is_usable(loss) else None
        computed = [made.get(id(native(variable))) for variable in variables]
        has_local = all(one is not None and _is_usable(one) for one in computed)
        self._note_sent(made)
        self._pending -= {id(native(variable)) for variable in variables}
        tensors = [
            tf.constant(math.nan) if loss is None or loss.shape.num_elements() != 1 else tf.reshape(loss, []),
            tf.convert_to_tensor(optimizer.learning_rate),
            *(some_values(gradient) for gradient, _ in pairs),
            *(some_values(variable) for variable in variables),
            *(some_values(one) for one in (computed if has_local else ())),
        ]
        order, line, kind = id(optimizer), self._observer.line_of_main(), type(optimizer).__name__
        counts = self._num_steps[replica]
        size_of_all = (False, sum(math.prod(variable.shape) for variable in variables))

        def write(loss: Any, rate: Any, *arrays: Any) -> None:
            size = len(names)
            applied, weights, own = arrays[:size], arrays[size : 2 * size], arrays[2 * size :]
            number = counts[order] = counts.get(order, 0) + 1
            step = Step(
                number=number,
                optimizer=list(counts).index(order) + 1,
                loop=self._observer.progress.loop,
                kind=kind,
                is_wrapped=False,
                learning_rates=(float(rate),),
                gradients=tuple(
                    Gradient(name, projections(own[i]) if has_local else None, projections(applied[i]))
                    for i, name in enumerate(names)
                ),
                weights={name: digest(weights[i]) for i, name in enumerate(names)},
                state={},
                loss=finite(loss),
                device="cpu",
                line=line,
            )
            self._observer.write(step, replica)
            is_enough = self._observer.progress.end_step(replica, step.optimizer, size_of_all)
            if is_enough and not self._observer.is_in_fit:
                self._observer.end("steps")
                os._exit(0)  # an exception raised here would not reach the script

        call_with(self._observer.quiet("steps of optimizers", write), tensors)

    def _note_sent(self, made: dict[int, Any]) -> None:
        """Make the step record the gradients that Horovod was given, if the script had changed any of a tape's."""
        usable = [one for one in made.values() if tf.is_tensor(one) and _is_usable(one)]
        changed = [pair for pair in zip(usable, sent, strict=False) if pair[0] is not pair[1]]
        is_known = [one.shape for one in usable] == [one.shape for one in sent] and all(map(_is_usable, sent))
        sent.clear()
        if changed and (not is_known or self._adds_up):
            self._observer.note_unseen("changes of gradients before the average", "they add up, or more is sent")
        if not changed or not is_known or self._adds_up:
            return
        line = self._observer.line_of_main()

        def write(*arrays: Any) -> None:
            for index, (before, after) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
                self._observer.write(Sent(f"weight {index}", projections(before), projections(after), line))

        values = [some_values(one) for pair in changed for one in pair]
        call_with(self._observer.quiet("changes of gradients before they are averaged", write), values)


def _is_local(variable: Any) -> bool:
    return id(native(variable)) in local


def _is_usable(tensor: Any) -> bool:
    """Return whether a tensor has a value here; those of a traced function have none outside of it."""
    return not tf.is_symbolic_tensor(tensor) or tensor.graph is tf.compat.v1.get_default_graph()


def install(observer: Observer) -> None:
    """Hook tapes and optimizers."""
    gradients = Gradients(observer)

    def observe_gradient(
        _tape: Any, target: Any, sources: Any, *_args: Any, **_kwargs: Any
    ) -> Generator[None, Any, None]:
        made = yield
        gradients.note_local(target, sources, made)

    def observe_reduction(optimizer: keras.Optimizer, _grads_and_vars: Any) -> Generator[None, Any, None]:
        reduced = yield
        gradients.observe(optimizer, reduced)

    name = "_all_reduce_sum_gradients"
    owner = owner_of(name, keras.optimizers.Optimizer)
    replace(owner, name, observer.around("steps of optimizers", observe_reduction))
    replace(tf.GradientTape, "gradient", observer.around("gradients of tapes", observe_gradient))
