#!/usr/bin/env bash
# Measures one GPU within 8 minutes; writes experiments/results/gpu.md.
#
#   experiments/benchmarks/gpu.sh
#   SIZE=tiny experiments/benchmarks/gpu.sh    every part on a CPU, writes nothing
#
# Numerics of the kernels, decoding at batch 1 and 64, SFT at 8k and 16k tokens
# and a GRPO step of a random Qwen3-0.6B. A part that fails or takes too long is
# a row that says so; the others run on. PYTHON names the interpreter, which
# needs jax for the GPU, flax, optax, orbax, chex, tokenizers, jinja2 and httpx.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3} size=${SIZE:-0p6b} most=470
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

# Runs a part for at most so many seconds, and no longer than all may take.
part() {
  local seconds=$1 left=$((most - SECONDS)) begin=$SECONDS
  timeout $((left < seconds ? left > 1 ? left : 1 : seconds)) \
    "$python" -m experiments.benchmarks.gpu "$2" --size="$size" >>"$rows" ||
    echo "{\"bench\": \"$2\", \"failed\": $?}" >>"$rows"
  echo "$2: $((SECONDS - begin)) s" >&2
}

part 40 machine
part 120 sft
part 110 decode
part 110 kernels
part 110 grpo
out=experiments/results/gpu.md
[[ $size == tiny ]] && out=/dev/null
"$python" -m experiments.benchmarks.gpu table --rows="$rows" | tee "$out"
! grep -q failed "$rows"
