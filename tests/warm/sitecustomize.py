"""Module that Python imports at its start where `tests/warm` comes first in PYTHONPATH: it may become a client."""

import os
import sys

import warm_client

sys.path.remove(os.path.dirname(__file__))
warm_client.start()
