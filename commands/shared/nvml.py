"""What NVIDIA's driver and its management library (NVML) say of the GPUs; nothing where there is no driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType

_ADDRESS_LENGTH = 32  # of a GPU on the PCI bus, as text


def num_visible() -> int:
    """GPUs that programs see here: CUDA_VISIBLE_DEVICES may hide some."""
    number = ctypes.c_int()
    try:
        driver = _driver()
    except OSError:
        return 0
    driver.cuDeviceGetCount(ctypes.byref(number))
    return number.value


def free_memory() -> tuple[int, ...]:
    """Bytes that are free on each GPU of this host."""
    nvml = _library()
    if nvml is None:
        return ()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return tuple(nvml.nvmlDeviceGetMemoryInfo(handle).free for handle in handles)


def energy_counter(gpu: int) -> Callable[[], float] | None:
    """What returns the joules that a GPU has taken since its driver was loaded; None where it does not count them.

    Args:
        gpu: its number among those that this process sees, which may not be all of the host's.
    """
    nvml = _library()
    if nvml is None:
        return None
    handle = nvml.nvmlDeviceGetHandleByPciBusId(_pci_address(gpu))

    def joules() -> float:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    try:
        joules()
    except nvml.NVMLError:  # GPUs before Volta, and slices of one, do not count
        return None
    return joules


@functools.cache
def _library() -> ModuleType | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or none that can be asked
        return None
    return pynvml


def _pci_address(gpu: int) -> bytes:
    """Of a GPU on the PCI bus: the name by which NVML finds what CUDA counts."""
    driver, device, address = _driver(), ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_LENGTH)
    driver.cuDeviceGet(ctypes.byref(device), gpu)
    driver.cuDeviceGetPCIBusId(address, len(address), device)
    return address.value


def _driver() -> ctypes.CDLL:
    """The driver itself, which counts as CUDA does.

    Raises:
        OSError: there is none.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)  # where it fails, so do questions
    return driver
