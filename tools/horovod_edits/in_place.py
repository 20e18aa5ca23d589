"""Edits to horovod.tensorflow's all-reduces: in place where nobody else has the tensor.

A gradient has no reader but the all-reduce. Reduced into its own memory it needs no second one, and MPI need not copy
it first. TensorFlow gives an operation the memory of its input only where that has no other owner.
"""

from __future__ import annotations

from horovod_edits.edit import Edit

IN_PLACE_EDITS = [
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="""\
    auto tensor = context->input(0);
    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);
    Tensor* output;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(0, tensor.shape(), &output), done);
""",
        new="""\
    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);
    Tensor* output;
    OP_REQUIRES_OK_ASYNC(
        context,
        context->forward_input_or_allocate_output(
            {0}, 0, context->input(0).shape(), &output),
        done);
    // Only now: a copy is an owner.
    auto tensor = context->input(0);
""",
        reason="a single tensor",
    ),
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="""\
      auto tensor = context->input(i);
      OP_REQUIRES_OK_ASYNC(
          context, context->allocate_output(i, tensor.shape(), &outputs[i]),
          done);
""",
        new="""\
      OP_REQUIRES_OK_ASYNC(
          context,
          context->forward_input_or_allocate_output(
              {i}, i, context->input(i).shape(), &outputs[i]),
          done);
""",
        reason="a group of them",
    ),
    Edit(
        path="horovod/common/common.cc",
        old="  if (callback != nullptr) {\n    callback(status);\n",
        new="""\
  if (callback != nullptr) {
    // What comes next may be the only owner.
    tensor.reset();
    output.reset();
    callback(status);
""",
        reason="the next operation on the result is in place, too",
    ),
]
