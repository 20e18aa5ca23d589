#!/bin/sh
# Builds Horovod and trains with the newest frameworks that the package index has, in a fresh environment, and says what
# broke. Usage: tools/canary.sh [FOLDER]; the environment and the logs stay in FOLDER (default: a temporary one).
set -u
cd "$(dirname "$0")/.." || exit 1
folder=${1:-$(mktemp -d)}
failed=

try() {
    name=$1
    shift
    if "$@" >"$folder/$name.log" 2>&1; then
        echo "ok: $name"
    else
        echo "FAILED: $name: $(tail -n 1 "$folder/$name.log") ($folder/$name.log)"
        failed=yes
    fi
}

python3 -m venv "$folder/environment" || exit 1
PATH=$folder/environment/bin:$PATH
export PATH
try install pip install --upgrade '.[pytorch,data]' tensorflow-cpu
pip list 2>/dev/null | grep -E '^(torch|torchvision|tensorflow|tensorflow-cpu|keras|numpy) '
try horovod allstep horovod install
cd "$folder" || exit 1
try pytorch python -m allstep.pytorch.train --epochs 2
try ddp torchrun --standalone --nproc-per-node 2 -m allstep.pytorch.train --strategy ddp --epochs 2
try fsdp torchrun --standalone --nproc-per-node 2 -m allstep.pytorch.train --strategy fsdp --epochs 2
try horovod-pytorch horovodrun -np 2 python -m allstep.pytorch.train --epochs 2
try mirrored python -m allstep.tensorflow.train --strategy mirrored --num-devices 2 --epochs 2
try horovod-tensorflow horovodrun -np 2 python -m allstep.tensorflow.train --epochs 2
try horovod-gloo horovodrun --gloo -np 2 python -m allstep.tensorflow.train --epochs 2
try parity allstep parity --optimizers momentum --ranks 1,2
[ -z "$failed" ]
