"""Edits to horovod.torch."""

from __future__ import annotations

from horovod_edits.edit import Edit

PYTORCH_EDITS = [
    # Who waits in hvd.synchronize: a condition variable instead of a loop that polls and yields, which takes
    # a whole core from the background thread that does the work.
    Edit(
        path="horovod/torch/handle_manager.h",
        old="  bool PollHandle(int handle);\n",
        new="  bool PollHandle(int handle);\n  void WaitHandle(int handle);\n",
        reason="declares the waiting",
    ),
    Edit(
        path="horovod/torch/handle_manager.h",
        old="  std::mutex mutex_;\n",
        new="  std::mutex mutex_;\n  std::condition_variable done_;\n",
        reason="what the waiting threads wait on",
    ),
    Edit(
        path="horovod/torch/handle_manager.h",
        old="#include <atomic>\n",
        new="#include <atomic>\n#include <condition_variable>\n",
        reason="std::condition_variable",
    ),
    Edit(
        path="horovod/torch/handle_manager.cc",
        old="  results_[handle] = std::make_shared<Status>(status);\n}\n",
        new="""\
  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

void HandleManager::WaitHandle(int handle) {
  std::unique_lock<std::mutex> guard(mutex_);
  done_.wait(guard, [&] {
    auto result = results_.find(handle);
    return result == results_.end() || result->second != nullptr;
  });
}
""",
        reason="wakes the threads that wait; a handle that Reset() cleared ends the wait as well",
    ),
    Edit(
        path="horovod/torch/handle_manager.cc",
        old="  results_.clear();\n",
        new="  results_.clear();\n  done_.notify_all();\n",
        reason="whoever waits for a cleared handle must be told",
    ),
    Edit(
        path="horovod/torch/mpi_ops_v2.cc",
        old="""\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        new="""\
  {
    py::gil_scoped_release release_python_gil;
    if (!handle_manager.PollHandle(handle)) AwaitCycle(SIZE_MAX);
    handle_manager.WaitHandle(handle);
  }
""",
        reason="the PyTorch wait span at 100% of a core; and it waited for the next cycle (see cycle.py)",
    ),
    Edit(
        path="horovod/torch/optimizer.py",
        old="    def zero_grad(self):\n",
        new="    def zero_grad(self, set_to_none=True):\n",
        count=2,
        reason="optimizer.zero_grad(set_to_none=...) of torch.optim works with the wrapped optimizer, too",
    ),
    Edit(
        path="horovod/torch/optimizer.py",
        old="        return super(self.__class__, self).zero_grad()\n",
        new="        return super(self.__class__, self).zero_grad(set_to_none)\n",
        count=2,
        reason="passes it on",
    ),
    # hvd.broadcast_optimizer_state gave an optimizer that has no state yet one by a step with gradients of zero.
    # That step decays the weights: of all ranks when none has state, and of all but the root when only the root
    # has (a resumed run), so that the ranks train different weights from then on; and a fresh Adam starts at 1.
    Edit(
        path="horovod/torch/functions.py",
        old="""\
    # Newly created optimizers will not have their state initialized, so
    # do that initialization here
    if len(state_dict['state']) == 0:
""",
        new="""\
    # State that the root does not have yet is made by each rank in its first step, from the same gradients.
    root_has_state = broadcast_object(len(state_dict['state']) > 0, root_rank, name='broadcast_optimizer_state')
    if not root_has_state:
        optimizer.state.clear()
        state_dict = optimizer.state_dict()

    # Newly created optimizers will not have their state initialized, so
    # do that initialization here
    if len(state_dict['state']) == 0:
        weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group['params']]
""",
        reason="a fresh state at the root needs no state at the others",
    ),
    Edit(
        path="horovod/torch/functions.py",
        old="""\
        if optimizer.__module__ == DistributedOptimizer.__module__:
            super(optimizer.__class__, optimizer).step()
        else:
            optimizer.step()
        state_dict = optimizer.state_dict()

    # If the state_dict is still empty after initialization, then
    # the optimizer is stateless, and there is nothing to broadcast.
    # Furthermore, attempting to access the state dict would result in
    # an error.
    if len(state_dict['state']) == 0:
        return
""",
        new="""\
        if root_has_state and optimizer.__module__ == DistributedOptimizer.__module__:
            super(optimizer.__class__, optimizer).step()
        elif root_has_state:
            optimizer.step()
        with torch.no_grad():
            for p, weight in weights:
                p.copy_(weight)
        state_dict = optimizer.state_dict()
""",
        reason="the step that makes state to be overwritten must not change the weights; "
        "options such as the learning rate are broadcast for an optimizer without state as well",
    ),
]
