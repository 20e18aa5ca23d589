"""Facts about GPUs from NVIDIA's driver and its management library (NVML); none without a driver."""

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType

_ADDRESS_LENGTH = 32  # of a GPU's address on the PCI bus, as text


def num_visible() -> int:
    """Return the number of GPUs that programs see; CUDA_VISIBLE_DEVICES may hide some."""
    number = ctypes.c_int()
    try:
        driver = _driver()
    except OSError:
        return 0
    driver.cuDeviceGetCount(ctypes.byref(number))
    return number.value


def free_memory() -> tuple[int, ...]:
    """Return the free bytes on each GPU of this host."""
    nvml = _library()
    if nvml is None:
        return ()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return tuple(nvml.nvmlDeviceGetMemoryInfo(handle).free for handle in handles)


def energy_counter(gpu: int) -> Callable[[], float] | None:
    """Return a function that returns the joules a GPU has taken since its driver was loaded; None if it counts none.

    `gpu` is its number among those that this process sees, which may not be all of the host's.
    """
    nvml = _library()
    if nvml is None:
        return None
    handle = nvml.nvmlDeviceGetHandleByPciBusId(_pci_address(gpu))

    def joules() -> float:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    try:
        joules()
    except nvml.NVMLError:  # GPUs before Volta, and MIG slices, do not count energy
        return None
    return joules


@functools.cache
def _library() -> ModuleType | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no usable driver
        return None
    return pynvml


def _pci_address(gpu: int) -> bytes:
    """Return the PCI address of a GPU, by which NVML finds the GPU that CUDA numbers `gpu`."""
    driver, device, address = _driver(), ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_LENGTH)
    driver.cuDeviceGet(ctypes.byref(device), gpu)
    driver.cuDeviceGetPCIBusId(address, len(address), device)
    return address.value


def _driver() -> ctypes.CDLL:
    """Load the driver itself, which numbers GPUs as CUDA does. Raises OSError if there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)  # if it fails, so do all later calls
    return driver
