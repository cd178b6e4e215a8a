"""Providers that go wrong, each in one way: `fault_kernels.py:NAME`. The sweep must survive them and say what happened."""

import itertools
import os
import resource
import time
from pathlib import Path

import torch


def right(q, k, v, *, mask, window, scale):
    return torch.softmax((q * scale) @ k.transpose(-1, -2), dim=-1) @ v


def raises(q, k, v, **parameters):
    raise ValueError("the kernel gave up")


def nan(q, k, v, **parameters):
    out = right(q, k, v, **parameters).clone()
    out[0, 0, 3, 5] = float("nan")
    return out


def wrong(q, k, v, *, mask, window, scale):
    return right(q, k, v, mask=mask, window=window, scale=scale * 1.01)


def one_wrong_row(q, k, v, **parameters):
    out = right(q, k, v, **parameters).clone()
    out[0, 0, 7] *= 1.5
    return out


def ignores_mask(q, k, v, **parameters):
    return right(q, k, v, **parameters)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, q, k, v, scale):
        context.save_for_backward(q, k, v)
        context.scale = scale
        return right(q, k, v, mask="none", window=None, scale=scale)

    @staticmethod
    def backward(context, grad_out):
        q, k, v = (t.detach().requires_grad_() for t in context.saved_tensors)
        with torch.enable_grad():
            out = right(q, k, v, mask="none", window=None, scale=context.scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
        return dq, dk * 1.02, dv, None


def wrong_gradients(q, k, v, *, mask, window, scale):
    return _WrongGradient.apply(q, k, v, scale)


def other_shape(q, k, v, **parameters):
    return right(q, k, v, **parameters).transpose(1, 2).contiguous()


def other_dtype(q, k, v, **parameters):
    return right(q, k, v, **parameters).double()


def mutates(q, k, v, **parameters):
    out = right(q, k, v, **parameters)
    k.mul_(1.001)
    return out


_turns = itertools.cycle((1.0, 1.0 + 5e-7))


def flaky(q, k, v, **parameters):
    """Every call differs from the one before it; at random, two of few values would now and then be the same."""
    return right(q, k, v, **parameters) * next(_turns)


def sleeps(q, k, v, **parameters):
    time.sleep(10_000)


def exits(q, k, v, **parameters):
    print("going away", flush=True)
    os._exit(9)


def hungry(q, k, v, **parameters):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), hard))
    try:
        kept = []
        while True:
            kept.append(torch.empty(64 << 20, dtype=torch.int8).fill_(1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class OutOfResources(Exception):
    """As Triton raises it; its class is known by its name, so that the worker need not import Triton."""


def too_large(q, k, v, **parameters):
    raise OutOfResources(
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
    )


def prints(q, k, v, **parameters):
    print("a library that prints to stdout", flush=True)
    return right(q, k, v, **parameters)


def out_of_bounds(q, k, v, **parameters):
    """On a GPU only: an access beyond an allocation leaves the context in a sticky error."""
    import triton
    import triton.language as tl

    @triton.jit
    def poke(pointer):
        tl.store(pointer + (1 << 40), 1.0)

    poke[(1,)](q)
    torch.cuda.synchronize()
    return right(q, k, v, **parameters)
