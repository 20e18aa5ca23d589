"""Run the cases of some files on each rank, for test_horovod_training.py and test_horovod_models.py.

Usage: horovodrun -np 2 python keras_behaviour.py DIRECTORY FILE... Each rank writes the values that the cases return
to DIRECTORY/rank{r}.json. keras_numerics.py has the cases that train and compare with a single process.
"""

import importlib
import json
import sys
import warnings

import keras
from keras_cases import CASES, DIRECTORY

import allstep.tensorflow.horovod_keras as hvd


def main() -> None:
    for file in sys.argv[2:]:
        importlib.import_module(file)
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
