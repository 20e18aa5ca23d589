"""Names that the layers of a Keras network keep when a program builds it again."""

import re
from collections import defaultdict

import keras

from allstep.tensorflow.compat import layers_in_order, to_snake_case


def first_names(network: keras.Model) -> dict[str, str]:
    """Return new names of the layers that Keras has named by numbers: those of a process that builds nothing else.

    Keras counts the layers of a process, so a network that is built again, as in a notebook, has other names. Layers
    whose numbers have another order than they have in the network keep theirs: some may be given by the user.
    """
    numbers, others = defaultdict[str, list[int]](list), set[str]()
    for layer in layers_in_order(network):
        # A wrapper such as Bidirectional puts a word before the name.
        kind = re.escape(to_snake_case(type(layer).__name__))
        if match := re.fullmatch(rf"((?:\w+_)?{kind})(?:_(\d+))?", layer.name):
            numbers[match[1]].append(int(match[2] or 0))
        else:
            others.add(layer.name)
    return {
        _numbered(stem, number): _numbered(stem, count)
        for stem, found in numbers.items()
        for count, number in enumerate(found)
        if found == sorted(set(found)) and others.isdisjoint(_numbered(stem, count) for count in range(len(found)))
    }


def _numbered(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem
