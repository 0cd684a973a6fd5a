"""Programs and kernels compiled for GPUs and TPUs that are not here.

`experiments/aot/run.sh` fetches the compilers, runs `pytest -m aot` with them,
and writes `experiments/results/aot.md`.

    targets     the devices, by name
    kernels     programs of one kernel each, with sizes of real models
    ptx         registers, spills and tensor-core instructions of GPU kernels
    checks      what a compiled program must do on several devices
    table       rows of measurements -> the table of results
"""
