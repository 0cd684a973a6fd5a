#!/usr/bin/env bash
# Compiles kernels and programs for GPUs and TPUs that are not here.
#
#   experiments/planner/run.sh                both platforms, and writes
#                                         experiments/results/aot.md
#   experiments/planner/run.sh cuda           one of them, cuda or tpu; writes nothing
#   PYTEST_ADDOPTS='-k kernels' experiments/planner/run.sh tpu
#   experiments/planner/run.sh with cuda COMMAND ...
#                                         runs a command with one compiler
#
# The compilers are wheels of 360 MB (cuda) and 210 MB (tpu), fetched by pip once
# into a folder of their own under POSTTRAIN_AOT_WHEELS, by default
# ~/.cache/posttrain/aot. No other Python process sees them. Exit code 3: they
# cannot be fetched.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
wheels=${POSTTRAIN_AOT_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/posttrain/aot}
version=$("$python" -c 'import jax; print(jax.__version__)')

# Prints the requirements of a platform's compiler.
requirements() {
  if [[ $1 == tpu ]]; then
    # The version of libtpu that this jax names for its extra `tpu`.
    "$python" -c 'import importlib.metadata, re
names = importlib.metadata.requires("jax")
print(next(x.split(";")[0].strip() for x in names if x.startswith("libtpu")))'
  else
    echo "jax-cuda13-pjrt==$version jax-cuda13-plugin==$version"
    echo 'nvidia-cuda-nvcc<14 nvidia-cuda-runtime<14 nvidia-cuda-nvrtc<14'
    echo 'nvidia-cuda-crt<14 nvidia-nvvm<14 nvidia-nvjitlink<14'
  fi
}

# Installs a platform's compiler, unless it is there.
fetch() {
  [[ -d $2 ]] && return
  rm -rf "$2.part"
  mkdir -p "$(dirname "$2")"
  # shellcheck disable=SC2046  # one argument per requirement
  "$python" -m pip install -q --no-deps --target "$2.part" $(requirements "$1") &&
    mv "$2.part" "$2"
}

# Runs a command with a platform's compiler.
with() {
  local platform=$1 folder=$wheels/$1-jax$version
  shift
  fetch "$platform" "$folder" || return 3
  export POSTTRAIN_AOT=$platform
  export PYTHONPATH=$PWD:$folder${PYTHONPATH:+:$PYTHONPATH} JAX_PLATFORMS=cpu
  if [[ $platform == tpu ]]; then
    export TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8
    export TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1
  else
    export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
    # Autotuning would run kernels.
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 \
--xla_gpu_cuda_data_dir=$(echo "$folder"/nvidia/cu*)"
  fi
  "$@"
}

# Runs the tests of a platform.
run() {
  with "$1" "$python" -m pytest -m aot tests/aot
}

if [[ ${1:-} == with ]]; then
  shift
  with "$@"
  exit
fi
if (($#)); then
  for platform in "$@"; do (run "$platform") || exit; done
  exit
fi
POSTTRAIN_AOT_ROWS=$(mktemp)
export POSTTRAIN_AOT_ROWS
trap 'rm -f "$POSTTRAIN_AOT_ROWS"' EXIT
failed=0
for platform in cuda tpu; do (run "$platform") || failed=1; done
PYTHONPATH=$PWD "$python" -m experiments.planner.aot "$POSTTRAIN_AOT_ROWS" \
  > experiments/results/aot.md
exit $failed
