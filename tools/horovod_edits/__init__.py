"""What we change in Horovod 0.28.1, its last release (June 2023), and why."""

from horovod_edits.compile import COMPILE_EDITS
from horovod_edits.cycle import CYCLE_EDITS
from horovod_edits.edit import Edit, EditFailed, apply_edits
from horovod_edits.faults import FAULT_EDITS
from horovod_edits.in_place import IN_PLACE_EDITS
from horovod_edits.launch import LAUNCH_EDITS
from horovod_edits.mistakes import MISTAKE_EDITS
from horovod_edits.network import NETWORK_EDITS
from horovod_edits.peers import PEER_EDITS
from horovod_edits.pytorch import PYTORCH_EDITS
from horovod_edits.security import SECURITY_EDITS
from horovod_edits.startup import STARTUP_EDITS
from horovod_edits.tensorflow import TENSORFLOW_EDITS

EDITS: tuple[Edit, ...] = (
    *COMPILE_EDITS,
    *CYCLE_EDITS,
    *LAUNCH_EDITS,
    *FAULT_EDITS,
    *NETWORK_EDITS,
    *STARTUP_EDITS,
    *PYTORCH_EDITS,
    *TENSORFLOW_EDITS,
    *IN_PLACE_EDITS,
    *SECURITY_EDITS,
    *PEER_EDITS,
    *MISTAKE_EDITS,
)

__all__ = ["EDITS", "Edit", "EditFailed", "apply_edits"]
