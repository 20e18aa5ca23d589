"""Run the scripts of keras_scripts/ on each rank, and plain Keras in one process beside them.

Usage: horovodrun -np 2 python run_keras_scripts.py DIRECTORY [NAME...]. Each rank writes DIRECTORY/rank{r}.json, with
what each script returns or the line of its error, and under "NAME/oracle" what plain Keras returns.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "keras_scripts"))

from stranger import HERE, SCRIPTS  # noqa: E402

import allstep.tensorflow.horovod_keras as hvd  # noqa: E402


def main() -> None:
    for file in sorted((Path(__file__).parent / "keras_scripts").glob("*.py")):
        importlib.import_module(file.stem)
    hvd.init()
    warnings.simplefilter("ignore")
    HERE.append(Path(sys.argv[1]))
    results = {}
    for number, script in enumerate(SCRIPTS):
        name = script.function.__name__
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        print(name, file=sys.stderr, flush=True)
        results[name] = run(script.function, hvd, hvd.rank(), hvd.size())
        # Plain Keras has no ranks; the oracles are shared out over them.
        if script.has_oracle and hvd.rank() == number % hvd.size():
            results[f"{name}/oracle"] = run(script.function, None, 0, 1)
    (HERE[0] / f"rank{hvd.rank()}.json").write_text(json.dumps(results))


def run(function, hvd, rank, size):
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    try:
        result = function(hvd, rank, size)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if isinstance(result, keras.Model):
        result = {"weights": result.weights}
    if not isinstance(result, dict):
        result = {"ended": "without an error"}
    return {name: plain(value) for name, value in result.items()}


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, str):
        return value
    return np.asarray(getattr(value, "value", value), np.float64).tolist()


if __name__ == "__main__":
    main()
