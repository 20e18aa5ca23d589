"""Edits to Horovod's background thread: a result that somebody waits for starts a cycle at once.

The thread looks for work once a cycle (HOROVOD_CYCLE_TIME, 1 ms), so that what arrives one by one, as gradients during
backward, is gathered and fused. Whoever waits for a result waited for the cycle first: 1.1 ms for an all-reduce of 8
bytes that takes 0.04 ms now. To sleep without any cycles until there is work was no gain: the first rank with work
then waits in MPI, polling, for a rank that still computes on the same cores.

Cycle follows cycle until there is an answer. The rank that is first meets the others in a cycle without one, since they
have no such tensor yet; were it to sleep then, they would wait for it as soon as they have.

TensorFlow does not say when it waits: its operations are asynchronous. There, one that has no other beside it starts a
cycle, and what comes while it is under way is gathered (as Nagle's algorithm does with small packets, RFC 896).
"""

from __future__ import annotations

from horovod_edits.edit import Edit

CYCLE_EDITS = [
    Edit(
        path="horovod/common/global_state.h",
        old="#include <queue>\n",
        new="#include <condition_variable>\n#include <mutex>\n#include <queue>\n",
        reason="for the members below",
    ),
    Edit(
        path="horovod/common/global_state.h",
        old="  // Whether collective context has been completed on the background thread.\n",
        new="""\
  // What ends the background thread's sleep before its next cycle is due.
  std::mutex wake_mutex;
  std::condition_variable wake;
  bool cycle_awaited = false;
  // Up to how many tensors without an answer are awaited by cycle after cycle.
  size_t num_awaited = 0;

  void AwaitCycle(size_t num_tensors) {
    {
      std::lock_guard<std::mutex> guard(wake_mutex);
      cycle_awaited = true;
      num_awaited = std::max(num_awaited, num_tensors);
    }
    wake.notify_one();
  }

  // After a cycle. The lock is held while tensors are counted: who awaits one
  // has queued it before.
  void KeepAwaiting() {
    std::lock_guard<std::mutex> guard(wake_mutex);
    if (num_awaited == 0) {
      return;
    }
    size_t unanswered = 0;
    for (auto id : process_set_table.Ids()) {
      unanswered += process_set_table.Get(id).tensor_queue.NumTensors();
    }
    if (unanswered > 0 && unanswered <= num_awaited) {
      cycle_awaited = true;
    } else {
      num_awaited = 0;
    }
  }

  // Whether collective context has been completed on the background thread.
""",
        reason="who waits can say so",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="""\
  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
""",
        new="""\
  auto due = state.last_cycle_start +
             std::chrono::microseconds(
                 long(state.parameter_manager.CycleTimeMs() * 1000.));
  {
    std::unique_lock<std::mutex> lock(state.wake_mutex);
    state.wake.wait_until(lock, due, [&] { return state.cycle_awaited; });
    state.cycle_awaited = false;
  }
""",
        reason="sleeps until a cycle is due, or somebody waits for one",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="""\
    should_shutdown |= response_list.shutdown();
  }

  return !should_shutdown;
""",
        new="""\
    should_shutdown |= response_list.shutdown();
  }
  state.KeepAwaiting();

  return !should_shutdown;
""",
        reason="no sleep before what is awaited is there",
    ),
    Edit(
        path="horovod/common/tensor_queue.h",
        old="  void FinalizeTensorQueue(const Status& status);\n",
        new="""\
  void FinalizeTensorQueue(const Status& status);

  size_t NumTensors() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return tensor_table_.size();
  }
""",
        reason="what is not answered yet",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="""\
  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);

""",
        new="""\
  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);
  if (entries.size() > 1) {
    horovod_global.AwaitCycle(0); // a group is complete
  }

""",
        reason="nothing is gained by waiting for more",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="    horovod_global.shut_down = true;\n    horovod_global.background_thread.join();\n",
        new="    horovod_global.shut_down = true;\n"
        "    horovod_global.AwaitCycle(0);\n"
        "    horovod_global.background_thread.join();\n",
        reason="the end of Horovod is waited for as well",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="""\
        << "Enqueued barrier op";
  }

  return status;
}
""",
        new="""\
        << "Enqueued barrier op";
  }

  return status;
}

void AwaitCycle(size_t num_tensors) { horovod_global.AwaitCycle(num_tensors); }
""",
        reason="for who waits for a result",
    ),
    Edit(
        path="horovod/common/operations.h",
        old="Status EnqueueBarrier(",
        new="""\
// Have the background thread begin a cycle now, and one after the other as
// long as there are tensors without an answer, but at most num_tensors.
void AwaitCycle(size_t num_tensors);

Status EnqueueBarrier(""",
        reason="declares it",
    ),
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="common::Status ConvertStatus(const Status& status) {\n",
        new="""\
// Operations that were called and are not done.
std::atomic<int> under_way{0};

std::function<void()> Counted(std::function<void()> done) {
  ++under_way;
  return [done] {
    --under_way;
    done();
  };
}

void AwaitCycleIfAlone() {
  if (under_way == 1) {
    common::AwaitCycle(1);
  }
}

common::Status ConvertStatus(const Status& status) {
""",
        reason="for the next edits",
    ),
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {\n",
        new="  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {\n    done = Counted(done);\n",
        count=9,
        reason="counts what is under way",
    ),
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="OP_REQUIRES_OK_ASYNC(context, ConvertStatus(enqueue_result), done);\n",
        new="OP_REQUIRES_OK_ASYNC(context, ConvertStatus(enqueue_result), done);\n    AwaitCycleIfAlone();\n",
        count=9,
        reason="a single operation need not wait for others",
    ),
]
