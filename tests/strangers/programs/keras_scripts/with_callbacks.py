"""Callbacks: those that stop, restore, and change the learning rate, and metrics of all kinds."""

import keras
import numpy as np
from stranger import (
    BATCH,
    CLASSES,
    HERE,
    STEPS,
    callbacks,
    compiled,
    distributed,
    fails,
    fit,
    loss,
    network,
    samples,
    shard,
    trains,
)


@trains
def early_stopping_on_averages(hvd, rank, size):
    model = compiled(hvd, network(rank), keras.optimizers.SGD(3.0, momentum=0.9))
    stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True, start_from_epoch=1)
    history = fit(hvd, model, rank, size, stop, epochs=8)
    return {"weights": model.weights, "epochs": len(history.history["loss"])}


@trains
def lower_rate_on_a_plateau(hvd, rank, size):
    model = compiled(hvd, network(rank), keras.optimizers.SGD(3.0))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.1, min_delta=10.0)
    fit(hvd, model, rank, size, plateau, epochs=4)
    return {"weights": model.weights, "rate": model.optimizer.learning_rate}


@trains
def rate_of_each_epoch(hvd, rank, size):
    model = compiled(hvd, network(rank))
    fit(hvd, model, rank, size, keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)))
    return model


class Rates(keras.callbacks.Callback):
    """Warm-up from 0.1 to 0.2 in an epoch, as Goyal et al. 2017 write it for two ranks."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        progress = min(self.epoch + (batch + 1) / STEPS, 1.0)
        self.model.optimizer.learning_rate = 0.2 / 2 * (progress * (2 - 1) + 1)


@trains
def warmup_with_many_steps_an_execution(hvd, rank, size):
    model = compiled(
        hvd, network(rank), keras.optimizers.SGD(0.2), run_eagerly=False, steps_per_execution=4 if hvd else 1
    )
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1) if hvd else Rates()
    fit(hvd, model, rank, size, warmup)
    assert model.steps_per_execution == (4 if hvd else 1)
    return {"weights": model.weights, "rate": model.optimizer.learning_rate}


@trains
def backup_on_the_first_rank(hvd, rank, size):
    folder = HERE[0] / ("backup" if hvd else "backup-plain")

    def backup():
        return [keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)] if rank == 0 else []

    def train(epochs):
        model = compiled(hvd, network(rank))
        x, y = (shard(array, rank, size) for array in samples())
        history = model.fit(x, y, BATCH // size, epochs, 0, [*backup(), *callbacks(hvd)], shuffle=False)
        return model, history.epoch

    train(2)
    model, epochs = train(5)
    return {"weights": model.weights, "epochs": epochs}


@trains
def files_on_the_first_rank(hvd, rank, size):
    model = compiled(hvd, network(rank))
    writes = [
        keras.callbacks.ModelCheckpoint(str(HERE[0] / "best.keras"), monitor="loss", save_best_only=True),
        keras.callbacks.CSVLogger(str(HERE[0] / "log.csv")),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    fit(hvd, model, rank, size, *(writes if rank == 0 else []))
    return model


class Note(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["phase"] = f"epoch {epoch}"


@trains
def metrics_of_one_value_a_class_and_words(hvd, rank, size):
    model = network(rank)
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(
        hvd.DistributedOptimizer(optimizer) if hvd else optimizer,
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.F1Score(), keras.metrics.Precision(thresholds=[0.2, 0.8]), "accuracy"],
        run_eagerly=True,
    )
    x, y = (shard(array, rank, size) for array in samples())
    listed = [Note(), *callbacks(hvd)]
    history = model.fit(x, np.eye(CLASSES)[y], BATCH // size, 2, 0, listed, shuffle=False).history
    shapes = {name: np.asarray(history[name]).shape for name in ("f1_score", "precision")}
    return {"weights": model.weights, "phase": history["phase"], "accuracy": history["accuracy"], **shapes}


@trains
def nan_on_one_rank(hvd, rank, size):
    """The samples of rank 1 have a NaN in the third batch; the whole batch has it then, too."""
    x, y = samples()
    x[2 * BATCH + BATCH // 2 + 1] = np.nan
    model = compiled(hvd, network(rank))
    x, y = shard(x, rank, size), shard(y, rank, size)
    listed = callbacks(hvd, keras.callbacks.TerminateOnNaN())
    model.fit(x, y, BATCH // size, 3, 0, listed, shuffle=False)
    return {"iterations": model.optimizer.iterations}


class StopAfter(keras.callbacks.Callback):
    """Stops after a batch, on the rank that has enough."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True


@trains
def own_callback_that_stops_one_rank(hvd, rank, size):
    model = compiled(hvd, network(rank))
    fit(hvd, model, rank, size, StopAfter(1 if rank == 0 else 99))
    return {"weights": model.weights, "iterations": model.optimizer.iterations}


@trains
def early_stopping_on_one_ranks_value(hvd, rank, size):
    """All ranks stop with the first that asks, and say so. Oracle: rank 0's decision."""

    class Value(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["value"] = float(epoch if rank == 0 else -epoch)

    model = compiled(hvd, network(rank))
    stop = keras.callbacks.EarlyStopping("value", mode="min", patience=2)
    x, y = (shard(array, rank, size) for array in samples())
    listed = [*callbacks(hvd), Value(), stop]
    history = model.fit(x, y, BATCH // size, 9, 0, listed, shuffle=False)
    return {"weights": model.weights, "epochs": history.epoch}


@trains
def validation_of_unequal_length(hvd, rank, size):
    """Ranks count equally in averages of validation, so a line tells it; training stays that of the whole batch."""
    x, y = samples(2, seed=7)
    part = {0: slice(0, 20), 1: slice(20, 32)}[rank] if hvd else slice(None)
    model = compiled(hvd, network(rank))
    fit(hvd, model, rank, size, validation_data=(x[part], y[part]))
    return model


@trains
def averages_of_weights_swapped_in(hvd, rank, size):
    model = compiled(hvd, network(rank), keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))
    fit(hvd, model, rank, size, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), epochs=3)
    return {"weights": model.trainable_weights}


@trains
def accumulates_clips_and_averages(hvd, rank, size):
    options = {"gradient_accumulation_steps": 4, "global_clipnorm": 0.05, "use_ema": True, "ema_overwrite_frequency": 2}
    model = compiled(hvd, network(rank), keras.optimizers.AdamW(0.05, weight_decay=0.2, ema_momentum=0.5, **options))
    fit(hvd, model, rank, size, epochs=3)
    return model


@trains
def loss_weight_in_a_variable(hvd, rank, size):
    weight, usual = keras.Variable(1.0, trainable=False), loss()

    class Weighs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            weight.assign(1.0 / (1 + epoch))

    model = network(rank)
    model.compile(distributed(hvd, keras.optimizers.SGD(0.1)), lambda y, outputs: weight * usual(y, outputs))
    fit(hvd, model, rank, size, Weighs())
    return model


@trains
def weights_and_momentum_set_by_callbacks(hvd, rank, size):
    class Sets(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.momentum = 0.9 - 0.4 * epoch

        def on_train_batch_end(self, batch, logs=None):
            for variable in self.model.trainable_weights:
                variable.assign(keras.ops.clip(variable, -0.4, 0.4))

    model = compiled(hvd, network(rank))
    fit(hvd, model, rank, size, Sets())
    return model


@fails
def best_weights_of_each_rank(hvd, rank, size):
    class Value(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["value"] = float(epoch if rank == 0 else -epoch)

    stop = keras.callbacks.EarlyStopping("value", mode="min", patience=2, restore_best_weights=True)
    return fit(hvd, compiled(hvd, network(rank)), rank, size, Value(), stop, epochs=5)


@fails
def early_stopping_on_one_rank(hvd, rank, size):
    more = [keras.callbacks.EarlyStopping("loss")] if rank == 0 else []
    return fit(hvd, compiled(hvd, network(rank)), rank, size, *more)


@fails
def averages_on_one_rank(hvd, rank, size):
    x, y = (shard(array, rank, size) for array in samples())
    listed = callbacks(hvd)[: 2 - rank]
    return compiled(hvd, network(rank)).fit(x, y, BATCH // size, 1, 0, listed)


@fails
def metrics_of_one_rank(hvd, rank, size):
    class Extra(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 0:
                logs["extra"] = 1.0

    x, y = (shard(array, rank, size) for array in samples())
    return compiled(hvd, network(rank)).fit(x, y, BATCH // size, 1, 0, [Extra(), *callbacks(hvd)])


@fails
def backup_without_a_broadcast(hvd, rank, size):
    folder = HERE[0] / "lone-backup"
    backup = [keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)] if rank == 0 else []
    x, y = (shard(array, rank, size) for array in samples())
    for epochs in (1, 2):
        compiled(hvd, network(0)).fit(x, y, BATCH // size, epochs, 0, backup, shuffle=False)


@fails
def files_on_all_ranks(hvd, rank, size):
    log = keras.callbacks.CSVLogger(str(HERE[0] / "log.csv"))
    backup = keras.callbacks.BackupAndRestore(str(HERE[0] / f"of-rank-{rank}"))  # which may be
    return fit(hvd, compiled(hvd, network(rank)), rank, size, backup, log)


@fails
def weights_without_a_broadcast(hvd, rank, size):
    x, y = (shard(array, rank, size) for array in samples())
    return compiled(hvd, network(rank)).fit(x, y, BATCH // size, 1, 0)
