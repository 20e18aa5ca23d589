"""State of a network as arrays: all entries of `state_dict()`, each in its own type.

Only this module distinguishes kinds of entries. NumPy and checkpoints lack some types of PyTorch, so bfloat16 is kept
as float32, which holds each of its values, and a complex number as a pair. The result of a module's `get_extra_state`
is kept as bytes (`extra_state`).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.state import ArrayShape
from allstep.common.training.trial import TRIAL, PassState
from allstep.pytorch.kept import extra_state

_INTEGERS = (f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64))
_NUMPY_TYPES = {getattr(torch, name): np.dtype(name) for name in ("bool", *_INTEGERS, "float16", "float32", "float64")}
_KEPT_AS = {torch.bfloat16: torch.float32, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Types of the arrays for types that NumPy lacks, and for complex numbers, whose arrays have one more axis."""
_EXTRA_STATE = "_extra_state"
"""Last part of the name of what `get_extra_state` returns, as torch 2.14's `state_dict` has it."""


def can_be_kept(dtype: torch.dtype) -> bool:
    """Return whether a checkpoint can hold numbers of this type."""
    return dtype in _NUMPY_TYPES or dtype in _KEPT_AS


def can_train(tensor: torch.Tensor) -> bool:
    """Return whether the type of a parameter allows gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a whole tensor as NumPy has it, without a copy where possible."""
    tensor = as_real(tensor.detach()).cpu()
    return tensor.to(_KEPT_AS.get(tensor.dtype, tensor.dtype)).numpy()


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of what `as_array` returned, with type, device and order in memory of `like`."""
    tensor = torch.from_numpy(array.copy())
    if like.is_complex():
        tensor = torch.view_as_complex(tensor)
    if hasattr(like, "to_local") or tensor.shape != like.shape:  # a shard of it, or bytes of another number
        return tensor.to(like.device, like.dtype)
    # Fused kernels of optimizers go through memory, so slots must lie in it as their weights do.
    return torch.empty_like(like, requires_grad=False).copy_(tensor)


def array_shape(tensor: torch.Tensor, **options: bool) -> ArrayShape:
    """Return shape and type of what `as_array` returns, with options of `ArrayShape`."""
    dtype = _NUMPY_TYPES[_KEPT_AS.get(tensor.dtype, tensor.dtype)]
    pair = (2,) if tensor.is_complex() else ()
    return ArrayShape((*tensor.shape, *pair), dtype=dtype, **options)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs in the same memory, and other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def entries(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of this rank's `state_dict()`, and its other entries as bytes."""
    for name, value in network.state_dict().items():
        if _is_extra(name):
            yield name, extra_state.encode(value)
        elif not value.is_meta:  # which another rank keeps
            yield name, value


def weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the entries that are real or complex numbers, not integers or others."""
    return ((name, tensor) for name, tensor in entries(network) if can_train(tensor))


def shapes(network: nn.Module) -> Iterator[tuple[str, ArrayShape]]:
    """Yield name and shape of each array of a network in a checkpoint; only parameters must be finite."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    resized = vars(network).get(TRIAL, PassState()).resized
    for name, value in network.state_dict().items():
        if _is_extra(name):
            yield name, ArrayShape((0,), dtype=np.dtype(np.uint8), any_length=True)
        else:
            # Weights of other programs may lack the counts of batch norms.
            options = {"finite": name in parameters, "optional": name.endswith("num_batches_tracked")}
            yield name, array_shape(value, **options, any_length=name in resized)


def as_bytes(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers as bytes in the same memory, since libraries cannot send all types of numbers."""
    tensors = {name: one.detach() for name, one in (*network.named_parameters(), *network.named_buffers())}
    return {
        # Sorted by stride, the axes of a tensor without gaps lie in memory one after the other.
        name: tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).view(-1).view(torch.uint8)
        for name, tensor in tensors.items()
        if extra_state.is_dense(tensor) and tensor.numel()
    }


def load_arrays(
    network: nn.Module, arrays: Mapping[str, np.ndarray], convert: Callable[[np.ndarray, torch.Tensor], torch.Tensor]
) -> None:
    """Load the entries of `network` that `arrays` has under their names in checkpoints.

    A file of weights may lack some, such as counts of batch norms. `convert` turns an array into a tensor like the
    present one, such as this rank's shard.
    """
    names = ((name, f"model/{name}", tensor) for name, tensor in entries(network))
    load(network, {name: convert(arrays[key], tensor) for name, key, tensor in names if key in arrays})


def load(network: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load some entries into `network` by its own `load_state_dict`."""
    state, resized = network.state_dict(), vars(network).get(TRIAL, PassState()).resized
    for name in list(state):
        if name in tensors and name in resized:
            state[name].resize_(tensors[name].shape)
        if name in tensors:
            state[name] = extra_state.decode(tensors[name]) if _is_extra(name) else tensors[name]
        else:
            del state[name]
    network.load_state_dict(state, strict=False)


def check(network: nn.Module, model: str) -> None:
    """Refuse a network with state that no checkpoint can hold, or with parameters of a type that cannot be trained."""
    for name, parameter in network.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return  # it gets a type in its first pass, after which the network is checked again
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            precision = {torch.bfloat16: " and give --precision bf16", torch.float16: " and give --precision fp16"}
            dtype = parameter.dtype
            raise UserError(
                f"expected weights in float32 of --model {model}, received others, as {name} in {_name(dtype)}; "
                f"convert them by .float(){precision.get(dtype, '')}"
            )
    for name, value in network.state_dict().items():
        if _is_extra(name):
            try:
                extra_state.check(value)
            except extra_state.Unknown as error:
                raise UserError(
                    f"a checkpoint cannot hold {name} of --model {model}, in which is a value of type "
                    f"{error}; have it return numbers, texts, tensors, and lists and dictionaries of these"
                ) from None
        elif not isinstance(value, torch.Tensor):
            raise UserError(
                f"expected tensors in state_dict() of --model {model}, received {name} of type {type(value).__name__}; "
                "return it from get_extra_state"
            )
        elif not extra_state.is_dense(value) or not can_be_kept(value.dtype):
            is_sparse = value.layout != torch.strided or value.is_nested
            kind = "a sparse or nested tensor" if is_sparse else f"a tensor of {_name(value.dtype)}"
            raise UserError(
                f"a checkpoint cannot hold {name} of --model {model}, {kind}; register it with persistent=False, or as "
                "a dense tensor of another type"
            )


def make_dense(network: nn.Module, model: str) -> None:
    """Make parameters and buffers dense in memory.

    Tensors with gaps or repeated elements (`expand`, strides) can be neither loaded nor broadcast in place, and fused
    kernels of optimizers would change numbers outside of them. Raises UserError if such a tensor is a part of another
    one, which copying would end.
    """
    tensors = {name: one for name, one in _tensors(network) if torch.empty_like(one).stride() != one.stride()}
    for name, other in sharing_memory(network):
        if name in tensors or other in tensors:
            raise UserError(
                f"expected parameters and buffers with memory of their own from --model {model}, received {name} and "
                f"{other}, one a part of the other; compute the part in forward"
            )
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.data = tensor.data.clone()


def sharing_memory(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of parameters or buffers that overlap in memory, such as views."""
    places = []
    for name, one in _tensors(network):
        length = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        places.append((one.data_ptr(), one.data_ptr() + length * one.element_size(), name))
    places.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            yield name, other


def _tensors(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that are in memory."""
    for name, one in (*network.named_parameters(), *network.named_buffers()):
        if extra_state.is_dense(one) and not nn.parameter.is_lazy(one) and not one.is_meta and one.numel():
            yield name, one


def is_lazy(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers that get their shapes in its first pass."""
    return any(map(nn.parameter.is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
