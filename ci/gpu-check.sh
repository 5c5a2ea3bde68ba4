#!/usr/bin/env bash
# What only a GPU can show of the portable backend: the whole suite on it, the golden cases, memory and races, speed.
#
#     ci/gpu-check.sh [FOLDER for logs]        (an installed checkout; DSV41_GOLDEN_DIR adds the large golden cases)
set -uo pipefail
cd "$(dirname "$0")/.."
logs="${1:-gpu-check}"
mkdir -p "$logs"
export DSV41_BACKEND=portable OMP_NUM_THREADS=1
failed=0

step() { # name, command
    local name="$1"
    shift
    if "$@" > "$logs/$name.txt" 2>&1; then echo "ok      $name"; else echo "FAILED  $name (see $logs/$name.txt)"; failed=1; fi
}

python3 -c "import torch; print(torch.cuda.get_device_name())" || exit 2

step suite python3 -P -m pytest -q -n "${JOBS:-8}"
step touch python3 -P ci/touch_kernels.py
if command -v compute-sanitizer > /dev/null; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
        step "$tool" timeout 900 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -P ci/touch_kernels.py
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
fi
step records python3 -P ci/record_errors.py
step bench dsv41 bench attention --backend portable --json
exit "$failed"
