# What the runner scripts share: ARCH BACKEND [FOLDER] are read, and the machine is the right one or nothing runs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
if [ $# -lt 2 ]; then
    echo "usage: $0 ARCH BACKEND [FOLDER for logs], such as $0 sm_90 flashmla" >&2
    exit 2
fi
arch="$1" backend="$2" logs="${3:-gpu-logs}"
failed=0

dsv41 ci expect "$arch" --backend "$backend" || exit 2
mkdir -p "$logs"
dsv41 probe --json > "$logs/probe.json" || exit 2

# The suite's own choice of a backend is the portable one; the job's backend is tested by name.
export DSV41_BACKEND=portable OMP_NUM_THREADS=1

step() { # name, command
    local name="$1"
    shift
    if "$@" > "$logs/$name.txt" 2>&1; then echo "ok      $name"; else echo "FAILED  $name (see $logs/$name.txt)"; failed=1; fi
}
