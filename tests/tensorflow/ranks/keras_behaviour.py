"""Runs on every rank of test_horovod_keras.py: what is not "train and compare with a single process".

Usage: horovodrun -np 2 python keras_behaviour.py DIRECTORY. Each rank writes DIRECTORY/rank{r}.json: the value that
each case of the files that are imported for them returned.
"""

import json
import sys
import warnings

import keras

# One launch runs the cases of all files, since TensorFlow takes seconds to start.
import keras_broadcasts  # noqa: F401
import keras_callbacks  # noqa: F401
import keras_gradients  # noqa: F401
import keras_replicas  # noqa: F401
import keras_saving  # noqa: F401
import keras_xla  # noqa: F401
from keras_cases import CASES, DIRECTORY

import allstep.tensorflow.horovod_keras as hvd


def main() -> None:
    hvd.init(process_sets="dynamic")
    warnings.simplefilter("ignore")
    results = {}
    for function in CASES:
        print(function.__name__, file=sys.stderr, flush=True)
        keras.backend.clear_session()
        results[function.__name__] = function()
    (DIRECTORY / f"rank{hvd.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
