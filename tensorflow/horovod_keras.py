"""Horovod for Keras 3: a drop-in for `horovod.keras` and `horovod.tensorflow.keras`.

    import allstep.tensorflow.horovod_keras as hvd

is the only change to a `model.fit` script. With Keras 3, the wrapper of Horovod 0.28.1 neither synchronises nor raises
an error: Keras no longer calls the methods that it overrides.
"""

import os
from typing import Any, cast

from allstep.common.process.requirements import missing

if _line := missing("tensorflow", "horovod"):
    raise ImportError(_line)

from allstep.tensorflow.numerics import wrong_keras

if line := wrong_keras():  # Horovod would fail with another line
    raise ImportError(line)

import h5py
import horovod.tensorflow
import keras
from horovod.tensorflow import (  # noqa: F401
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    alltoall,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import (  # noqa: F401
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

from allstep.common.cli.strategy_flags import check_horovod, check_launcher_of_horovod, use_gloo_alone
from allstep.common.launch.placement import find_placement
from allstep.common.launch.unclaimed_ranks import check_alone
from allstep.tensorflow.drop_in import callbacks as callbacks  # noqa: F401
from allstep.tensorflow.drop_in import elastic as elastic  # noqa: F401
from allstep.tensorflow.drop_in.batch_norm import SyncBatchNormalization  # noqa: F401
from allstep.tensorflow.drop_in.collectives import allgather, allreduce, broadcast, broadcast_variables, reducescatter  # noqa: F401
from allstep.tensorflow.drop_in.collectives import gather as _gather
from allstep.tensorflow.drop_in.hooks import (
    compiled_models,
    has_keras_step,
    policy_of_saved_optimizer,
    restore_h5_optimizer,
    track_model,
)
from allstep.tensorflow.drop_in.optimizer import (
    DistributedOptimizer,
    distribute_again,
    lasting_state,
    saved_entry,
)
from allstep.tensorflow.drop_in.reduction import is_elastic
from allstep.tensorflow.drop_in.replicas import is_built
from allstep.tensorflow.drop_in.saving import make_plain
from allstep.tensorflow.drop_in.stalls import STALL_SECONDS, limit_stalls


def init(*args: Any, stall_timeout: int = STALL_SECONDS, **options: Any) -> None:
    """Call `horovod.tensorflow.init`. A process without a launcher trains as a single rank and needs no MPI.

    stall_timeout: seconds after which a rank that waits for another ends the job, 0 for never; the variable
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS takes precedence.

    Raises:
        UserError: torchrun, or RANK and WORLD_SIZE, have set up several ranks, which Horovod does not support, or the
            environment shows signs of ranks that no launcher has described.
        Fault: the launcher has started another number of ranks than Horovod sees, each of which would train alone.
    """
    placement = find_placement()
    check_launcher_of_horovod(placement, user="horovod_keras")
    check_alone(placement, chosen=False, to_train_alone="unset SLURM_NTASKS")
    use_gloo_alone(placement)
    limit_stalls(placement, stall_timeout)
    horovod.tensorflow.init(*args, **options)
    forms_all_ranks = not (args or options.get("comm"))  # `comm` names some of them
    if forms_all_ranks and not is_elastic():
        check_horovod(placement, "average", size=size(), mpi_enabled=mpi_enabled())


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Return a `DistributedOptimizer` that does not share the weights of `local_layers` (built layers)."""
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer) or not layer.built:
            raise ValueError(f"`local_layers` must be built Keras layers. Received: {layer!r}")
    optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in [v for layer in layers for v in layer.trainable_variables]:
        optimizer.register_local_var(variable)
    return optimizer


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast the weights and optimizer state of every live model compiled with a `DistributedOptimizer`.

    Keras 3 keeps no list of all variables; these are the models that this module tracks.

    Raises:
        RuntimeError: there is no such model, one has no weights yet, or the ranks' models differ.
    """
    models = compiled_models()
    for model in models:
        if is_built(model) and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    variables = [v for model in models for v in [*model.weights, *lasting_state(model.optimizer)]]
    shapes = _gather([list(v.shape) for v in variables], "broadcast_global_variables")
    if not models or not all(map(is_built, models)) or any(other != shapes[0] for other in shapes):
        raise RuntimeError(
            "broadcast_global_variables() needs the same built models, compiled with a DistributedOptimizer, on "
            "every rank. Use callbacks.BroadcastGlobalVariablesCallback(root_rank), or name the variables: "
            "broadcast_variables(model.weights, root_rank)."
        )
    broadcast_variables(variables, root_rank)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type | None = None,
    legacy_opts: bool = False,
    **options: Any,
) -> keras.Model:
    """Load a model saved by Keras, with or without Horovod, and distribute its optimizer, keeping the state.

    custom_optimizers: your optimizer classes that the file may name.
    custom_objects: as in `keras.models.load_model`.
    compression, options: further arguments of `DistributedOptimizer`. Defaults are the values when the model was saved,
        but .h5 files do not record them, and process sets, lists of groups and local variables are not saved.

    Raises:
        ValueError: `legacy_opts` is set (Keras 3 has no legacy optimizers), the file is not a saved model, or it is an
            .h5 file whose optimizer accumulates gradients and no option tells whether to sum or to average them.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers: `legacy_opts` must be False.")
    if compression is not None:
        options["compression"] = compression
    optimizers = {cls.__name__: cls for cls in custom_optimizers or []}
    with policy_of_saved_optimizer(filepath):
        loaded = keras.models.load_model(filepath, custom_objects={**optimizers, **(custom_objects or {})})
    model = cast("keras.Model", loaded)  # Keras' annotations do not tell
    if model.optimizer is not None:
        if h5py.is_hdf5(filepath):
            restore_h5_optimizer(model, filepath, options)
        saved = saved_entry(model.optimizer)
        if saved is None:
            DistributedOptimizer(model.optimizer, **options)
        elif options:
            make_plain(model.optimizer)
            distribute_again(model.optimizer, saved, **options)
        if not has_keras_step(model):  # XLA would compile Horovod's operations, too
            model.jit_compile = False
        track_model(model)
    return model
