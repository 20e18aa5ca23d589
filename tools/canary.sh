#!/bin/sh
# Builds Horovod beside the newest frameworks that the package index has, trains with them, and says what broke.
# Usage: tools/canary.sh [FOLDER]; the logs stay in FOLDER (default: a temporary one).
exec python3 "$(dirname "$0")/matrix.py" "${1:-$(mktemp -d)}" --newest
