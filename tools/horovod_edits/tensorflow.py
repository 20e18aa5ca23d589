"""Edits to horovod.tensorflow: what Keras 3 and the end of TensorFlow 1's names broke."""

from __future__ import annotations

from horovod_edits.edit import Edit

TENSORFLOW_EDITS = [
    # Keras 3's variables are not tf.Variables but hold one.
    Edit(
        path="horovod/tensorflow/util.py",
        old="def vars_to_refs(vars):\n",
        new="""\
def tf_variable(variable):
    \"\"\"The tf.Variable in a variable of Keras 3; anything else as it is.\"\"\"
    return variable.value if isinstance(variable, tf.keras.Variable) else variable


def vars_to_refs(vars):
""",
        reason="for the edits below",
    ),
    Edit(
        path="horovod/tensorflow/util.py",
        old="    return vars.ref()\n",
        new="    return tf_variable(vars).ref()\n",
        reason="groups of a DistributedGradientTape may hold variables of Keras 3",
    ),
    Edit(
        path="horovod/tensorflow/functions.py",
        old="import _cache, _executing_eagerly, _make_subgraph\n",
        new="import _cache, _executing_eagerly, _make_subgraph, tf_variable\n",
        reason="for the next edit",
    ),
    Edit(
        path="horovod/tensorflow/functions.py",
        old="    if inplace:\n        vars_by_device = {}\n",
        new="    variables = [tf_variable(var) for var in variables]\n    if inplace:\n        vars_by_device = {}\n",
        reason="hvd.broadcast_variables(model.variables, root_rank=0)",
    ),
    Edit(
        path="horovod/tensorflow/__init__.py",
        old="import _executing_eagerly, _make_subgraph, _cache, vars_to_refs, refs_to_vars\n",
        new="import _executing_eagerly, _make_subgraph, _cache, tf_variable, vars_to_refs, refs_to_vars\n",
        reason="for the next edits",
    ),
    Edit(
        path="horovod/tensorflow/__init__.py",
        old="            gradients = super(self.__class__, self).gradient(target, sources, output_gradients)\n",
        new="            sources = [tf_variable(source) for source in sources]\n"
        "            gradients = super(self.__class__, self).gradient(target, sources, output_gradients)\n",
        reason="DistributedGradientTape.gradient(loss, model.trainable_variables)",
    ),
    Edit(
        path="horovod/tensorflow/__init__.py",
        old="            if _IS_TF2:\n                self._local_sources.add(source.ref())\n",
        new="            if _IS_TF2:\n                self._local_sources.add(tf_variable(source).ref())\n",
        reason="PartialDistributedGradientTape(local_layers=...)",
    ),
    Edit(
        path="horovod/tensorflow/__init__.py",
        old="is_local_source = s.ref() in self._local_sources if _IS_TF2",
        new="is_local_source = tf_variable(s).ref() in self._local_sources if _IS_TF2",
        reason="PartialDistributedGradientTape(...).get_local_and_global_gradients(loss, model.trainable_variables)",
    ),
    Edit(
        path="horovod/tensorflow/elastic.py",
        old="optimizer.variables()",
        new="optimizer.variables",
        count=4,
        reason="a list in Keras 3, no method",
    ),
    Edit(
        path="horovod/tensorflow/__init__.py",
        old="        _SessionRunHook = tf.train.SessionRunHook\n",
        new="        _SessionRunHook = tf.compat.v1.train.SessionRunHook\n",
        reason="tf.estimator, where the class was looked for first, is gone; without it there is no "
        "hvd.BroadcastGlobalVariablesHook",
    ),
    Edit(
        path="horovod/tensorflow/functions.py",
        old="tf.placeholder(",
        new="tf.compat.v1.placeholder(",
        count=2,
        reason="hvd.broadcast_object_fn used the name of TensorFlow 1",
    ),
    # SyncBatchNormalization on the BatchNormalization of Keras 3.
    Edit(
        path="horovod/tensorflow/sync_batch_norm.py",
        old="""\
    if not kwargs.get('name', None):
      kwargs['name'] = 'sync_batch_normalization'
    super(SyncBatchNormalization, self).__init__(fused=fused, **kwargs)
""",
        new="    super(SyncBatchNormalization, self).__init__(**kwargs)\n",
        reason="Keras 3 has no `fused`, and makes this name itself, numbered where a model has several such layers",
    ),
    Edit(
        path="horovod/tensorflow/sync_batch_norm.py",
        old="  def _moments(self, inputs, reduction_axes, keep_dims, **kwargs):\n",
        new="  def _moments(self, inputs, mask):\n",
        reason="the signature in Keras 3",
    ),
    Edit(
        path="horovod/tensorflow/sync_batch_norm.py",
        old="._moments(\n      inputs, reduction_axes, keep_dims=keep_dims, **kwargs)\n",
        new="._moments(inputs, mask)\n",
        reason="the signature in Keras 3",
    ),
    Edit(
        path="horovod/tensorflow/sync_batch_norm.py",
        old="""\

  def call(self, *args, **kwargs):
    outputs = super(SyncBatchNormalization, self).call(*args, **kwargs)
    try:
      # A temporary hack for TF1 compatibility with Keras batch norm.
      # Ops are added to tf.GraphKeys.UPDATE_OPS manually to mimic
      # behavior of TF1 batch norm layer for use in control dependencies.
      for u in self.updates:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, u)
    except AttributeError:
      pass
    return outputs
""",
        new="",
        reason="for TensorFlow 1 only; and Keras 3 gives a layer `training` only if its call() names that argument",
    ),
]
