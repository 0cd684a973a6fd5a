"""The planner: compiled programs of devices that need not be here.

    python -m experiments.planner.census   communication, by CPU devices
    experiments/planner/run.sh             the compilers of CUDA and TPU
    python -m experiments.planner.memory   measured memory: LoRA, DPO, loading

`python -m posttrain.main --dry_run --devices=gpu:8` plans a run instead, and
compiles nothing.
"""
