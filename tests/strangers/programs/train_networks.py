"""Networks of tests/stranger_networks.py on the ranks at hand; run by test_network_state.py.

    python train_networks.py DIRECTORY STRATEGY NAME... [--compile]

Each is trained in two parts, the second one from the checkpoint of the first, and compared with a plain loop.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stranger_networks import NETWORKS, assert_same_state, expected, train_twice

DIRECTORY, STRATEGY, *NAMES = (word for word in sys.argv[1:] if word != "--compile")
COMPILES = "--compile" in sys.argv

if __name__ == "__main__":
    for name in NAMES:
        build, optimizer = NETWORKS[name], "adam" if name == "Complex" else "sgd"
        found = train_twice(build, f"{DIRECTORY}/{name}", strategy=STRATEGY, optimizer=optimizer, compile=COMPILES)
        assert_same_state(found, expected(build(), optimizer))
        print(f"{name} as in one process", flush=True)
