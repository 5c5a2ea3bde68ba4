#!/usr/bin/env bash
# What only an AMD GPU can show: the whole suite on it, the golden cases, conformance, speed.
#
#     ci/run-rocm.sh ARCH BACKEND [FOLDER for logs]      (an installed checkout; DSV41_GOLDEN_DIR adds the large cases)
. "$(dirname "$0")/steps.sh"

step suite python3 -P -m pytest -q -n "${JOBS:-8}"
step touch python3 -P ci/touch_kernels.py
step records python3 -P ci/record_errors.py
step check dsv41 check --backend "$backend" --full --report "$logs/check.json"
step bench dsv41 bench attention --backend portable --json
exit "$failed"
