"""Sum over slices on the ranks of a job in the given framework, and print which of the sums used an all-reduce.

Oracle: the sum by the tree in NumPy over all slices, which each rank can generate.
"""

import sys
from importlib import import_module

import numpy as np

from allstep.common.data.slices import TreeSum, local_nodes, local_slices


def tree_sum(num_slices: int, numbers: range, size: int) -> TreeSum:
    """Sum vectors whose sum depends on the order."""
    sums: TreeSum[np.ndarray] = TreeSum(num_slices)
    for number in numbers:
        sums.add((number, number + 1), np.random.default_rng(number).standard_normal(size, np.float32))
    return sums


framework = sys.argv[1]
horovod, library, to_tensor = {
    "pytorch": ("horovod.torch", "torch", "from_numpy"),
    "tensorflow": ("allstep.tensorflow.horovod_keras", "tensorflow", "constant"),
}[framework]
hvd, strategies = import_module(horovod), f"allstep.{framework}.strategies"
OrderedSum = import_module(f"{strategies}.ordered_sum").OrderedSum
HorovodExchange = import_module(f"{strategies}.horovod").HorovodExchange
to_tensor = getattr(import_module(library), to_tensor)

hvd.init()
rank, world_size = hvd.rank(), hvd.size()
found = []
for num_slices, size in [(world_size, 400), (world_size, 40_000), (world_size, 400_000), (world_size + 1, 40_000)]:
    ordered_sum = OrderedSum(num_slices, rank, world_size, HorovodExchange(keeps_order=True))
    own = tree_sum(num_slices, local_slices(rank, world_size, num_slices), size).partial
    assert tuple(own) == local_nodes(rank, world_size, num_slices)
    total = ordered_sum({node: to_tensor(vector) for node, vector in own.items()})
    assert np.array_equal(total.numpy(), tree_sum(num_slices, range(num_slices), size).total)
    found.append(ordered_sum.in_order[size])
if rank == 0:
    print("by all-reduce:", *found)
hvd.shutdown()
