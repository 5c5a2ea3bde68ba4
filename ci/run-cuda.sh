#!/usr/bin/env bash
# What only an NVIDIA GPU can show: the whole suite on it, the golden cases, memory and races, conformance, speed.
#
#     ci/run-cuda.sh ARCH BACKEND [FOLDER for logs]      (an installed checkout; DSV41_GOLDEN_DIR adds the large cases)
. "$(dirname "$0")/steps.sh"

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
step check dsv41 check --backend "$backend" --full --report "$logs/check.json"
for timed in $(printf "%s\n" "$backend" portable | sort -u); do
    step "bench-$timed" dsv41 bench attention --backend "$timed" --json
done
exit "$failed"
