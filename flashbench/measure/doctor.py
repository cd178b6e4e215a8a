"""What is wrong with a machine for measuring, what each fault costs, and the command that cures it. Changes nothing itself.

Every cost names its source: a public thread, a vendor's document, or this project's own measurement. "No figure" is said where
none is known. Each check is a function from the facts (measure/machine.py) to findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flashbench.measure.findings import Finding, Severity, worst_first
from flashbench.measure.gpu_checks import GPU_CHECKS
from flashbench.measure.machine import Machine

FEW_CORES = 4
LOW_DISK_BYTES = 1 << 30
NO_DISK_BYTES = 64 << 20

SLOW_HOST_CPU = "times on a CPU follow its clock and whatever else it runs (no figure)"
SLOW_HOST_GPU = (
    "the host launches late: of a 36 us kernel (FA3, head_dim 128, 1k causal) a loop without a spin read 271 TFLOP/s where "
    "472 is true (measured on an H200); the spin prevents that here, at the price of discarded samples"
)
ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "each launch waits for its kernel, so no sample by events counts (by construction; no figure)",
    "TRITON_INTERPRET": "Triton kernels run on the CPU in Python: they are checked, never timed",
    "NVIDIA_TF32_OVERRIDE": "fp32 products become tf32, or tf32 ones fp32, whatever the dtype of the row says",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver and waits for the GPU (no figure)",
}
"""Variables that change what is measured, and how."""


def examine(machine: Machine) -> list[Finding]:
    """All findings, worst first; within a severity in the order of the checks."""
    found = [finding for check in CHECKS for finding in check(machine)]
    found += [finding for gpu in machine.gpus for check in GPU_CHECKS for finding in check(gpu)]
    return worst_first(found)


def _access(m: Machine) -> Iterator[Finding]:
    if m.gpus:
        yield Finding("ok", f"NVML reads {len(m.gpus)} GPU(s): {', '.join(gpu.name for gpu in m.gpus)}")
    elif m.nvml_problem is None:
        yield Finding(
            "problem",
            f"the driver runs and no GPU is visible (CUDA_VISIBLE_DEVICES='{m.environment.get('CUDA_VISIBLE_DEVICES', '')}')",
            "only the CPU can be measured",
            "unset CUDA_VISIBLE_DEVICES && nvidia-smi -L",
        )
    elif m.driver_present:
        cure = "pip install nvidia-ml-py" if "nvidia-ml-py" in m.nvml_problem else "nvidia-smi"
        yield Finding(
            "problem",
            f"there is an NVIDIA driver, but the GPU's state cannot be read: {m.nvml_problem}",
            "rows have no clocks, power or throttle reasons, and nothing below about the GPU was checked",
            cure,
        )
    else:
        yield Finding("info", f"no GPU here ({m.nvml_problem})", "only the CPU can be measured")


def _versions(m: Machine) -> Iterator[Finding]:
    if m.torch is None:
        yield Finding("problem", "torch is not installed", "nothing can be measured", "pip install torch")
        return
    if m.gpus and m.torch_cuda is None:
        yield Finding(
            "problem",
            f"torch {m.torch} is built without CUDA",
            "the GPU is never used",
            "pip install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    elif m.torch_cuda is not None and m.driver_cuda is not None:
        built, supported = _dotted(m.torch_cuda), _dotted(m.driver_cuda)
        what = f"torch {m.torch} is built for CUDA {built}, driver {m.driver} supports up to {supported}"
        if m.torch_cuda[0] > m.driver_cuda[0]:
            cure = f"update the driver, or pip install a torch built for CUDA {m.driver_cuda[0]}"
            yield Finding("problem", what, "CUDA does not start (CUDA Compatibility, NVIDIA)", cure)
        elif m.torch_cuda > m.driver_cuda:
            yield Finding(
                "info", what, "compiled kernels run, PTX of the newer CUDA does not (CUDA Compatibility, NVIDIA)", None
            )
        else:
            yield Finding("ok", what)
    if m.triton is not None and m.triton_wanted is not None:
        if m.triton.partition("+")[0] == m.triton_wanted.partition("+")[0]:
            yield Finding("ok", f"triton {m.triton} is what torch {m.torch} asks for")
        else:
            yield Finding(
                "warning",
                f"triton {m.triton} is not the {m.triton_wanted} that torch {m.torch} asks for",
                "torch.compile and FlexAttention may fail, and times are those of a pair that torch does not test (no figure)",
                f"pip install triton=={m.triton_wanted}",
            )
    if m.old_pynvml is not None:
        yield Finding(
            "warning",
            f"the deprecated package pynvml {m.old_pynvml} is installed",
            "it warns at import, old releases hide nvidia-ml-py and give names as bytes (mlco2/codecarbon #933, vllm PR #7649)",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )


def _host(m: Machine) -> Iterator[Finding]:
    slow_host = SLOW_HOST_GPU if m.gpus else SLOW_HOST_CPU
    if m.governors is not None:
        slow = [governor for governor in m.governors if governor != "performance"]
        if slow:
            cure = "sudo cpupower frequency-set -g performance"
            yield Finding(
                "warning",
                f"the CPU's frequency governor is {', '.join(slow)}",
                slow_host,
                cure,
            )
        else:
            yield Finding("ok", "the CPU's frequency governor is performance")
    if m.cores is not None and m.load is not None:
        what = f"load {m.load:.1f} on {m.cores} cores"
        if m.load > max(1.0, m.cores / 2):
            yield Finding("warning", f"the CPU is busy: {what}", slow_host, "ps -eo pcpu,pid,args --sort=-pcpu | head")
        elif m.cores < FEW_CORES:
            yield Finding("info", f"few cores: {what}", slow_host, None)
        else:
            yield Finding("ok", what)
    if m.virtual:
        cost = "the host's clocks and scheduling are the hypervisor's, and neighbours cannot be seen (no figure)"
        yield Finding("info", "this is a virtual machine", cost)


def _counters(m: Machine) -> Iterator[Finding]:
    if not m.gpus:
        return
    lost = "HBM bytes are modelled only, not measured beside the model"
    if m.ncu is None:
        yield Finding("info", "ncu (Nsight Compute) is not on PATH", lost, "sudo apt-get install nsight-compute")
    elif m.counters_for_admin_only and not m.is_admin:
        yield Finding(
            "info",
            "the GPU's counters are for administrators only (RmProfilingAdminOnly: 1)",
            f"{lost} (ncu: ERR_NVGPUCTRPERM); times and the profiler's kernel times are not affected",
            "echo options nvidia NVreg_RestrictProfilingToAdminUsers=0 | sudo tee /etc/modprobe.d/nvidia-profiling.conf"
            "  # then reboot",
        )
    else:
        yield Finding("ok", f"counters can be read through {m.ncu}")


def _files(m: Machine) -> Iterator[Finding]:
    if not m.writable:
        yield Finding("problem", f"'{m.results}' cannot be written", "no row can be stored", "use another --out")
    if m.free_bytes is not None:
        what = f"{m.free_bytes / 2**30:.1f} GiB are free for '{m.results}'"
        if m.free_bytes < LOW_DISK_BYTES:
            severity: Severity = "problem" if m.free_bytes < NO_DISK_BYTES else "warning"
            yield Finding(severity, what, "a full disk ends a run; its finished rows are kept", f"df -h '{m.results}'")
        else:
            yield Finding("ok", what)
    for lock in m.locks:
        if lock.holder is not None:
            cost = "a sweep of that GPU is refused while it runs, and anything else measures both"
            yield Finding("warning", f"process {lock.holder} is measuring ({lock.path})", cost, f"ps {lock.holder}")
        elif not lock.writable:
            yield Finding(
                "problem",
                f"a lock file of another user was left behind: {lock.path}",
                "a sweep of that GPU cannot take its lock",
                f"sudo rm {lock.path}",
            )


def _environment(m: Machine) -> Iterator[Finding]:
    for name, cost in ENVIRONMENT.items():
        value = m.environment.get(name, "")
        if value and (value.lower() not in ("0", "false", "off", "no") or name == "NVIDIA_TF32_OVERRIDE"):
            yield Finding("warning", f"{name}={value} is set", cost, f"unset {name}")


CHECKS: tuple[Callable[[Machine], Iterable[Finding]], ...] = (
    _access,
    _versions,
    _environment,
    _host,
    _counters,
    _files,
)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
