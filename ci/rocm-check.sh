#!/usr/bin/env bash
# What only an MI300X or MI355X can show: the kernels on it, aiter beside the reference, speed. One archive to send back.
#
#     ci/rocm-check.sh [FOLDER for logs]       (an installed checkout with its dev extra; docs/backends-rocm.md)
set -uo pipefail
cd "$(dirname "$0")/.."
logs="${1:-rocm-check}"
mkdir -p "$logs"
export OMP_NUM_THREADS=1
unset DSV41_BACKEND
failed=0

step() { # name, command
    local name="$1"
    shift
    echo "$*" > "$logs/$name.txt"
    if "$@" >> "$logs/$name.txt" 2>&1; then echo "ok      $name"; else echo "FAILED  $name (see $logs/$name.txt)"; failed=1; fi
}

arch="$(python3 -c "import torch; print(torch.cuda.get_device_properties(0).gcnArchName.split(':')[0])")" || exit 2
# Cache formats that aiter reads there, each with a format of index keys.
case "$arch" in
    gfx950) formats="fp8_ds_mla/mxfp4 fp8_ds_mla/fp8 fp8_e4m3/fp8 bfloat16/fp8" record=fp8_ds_mla_v4 ;;
    gfx942) formats="fp8_e4m3/mxfp4 fp8_e4m3/fp8" record=fp8_e4m3 ;;
    *) echo "this is $arch: expected gfx942 or gfx950"; exit 2 ;;
esac

echo "device  $arch"
step environment python3 -m torch.utils.collect_env
step packages python3 -m pip list
step probe dsv41 probe
step probe-json dsv41 probe --json

# The portable kernels, and those around aiter with its calls emulated.
step suite env DSV41_BACKEND=portable python3 -P -m pytest -q tests/backends/portable tests/backends/rocm tests/model/test_portable.py

# Layers of every role in the release's geometry, long enough that the indexer leaves rows out.
step checkpoint dsv41 make-checkpoint "$logs/checkpoint" --layers 0,2,3,20,24
run="dsv41 run $logs/checkpoint --requests 2 --prompt 1500 --decode 16 --chunk 500 --verify --json"
step portable $run --backend portable --index-cache-dtype fp8
for format in $formats; do
    step "aiter-${format/\//-}" $run --backend aiter --kv-cache-dtype "${format%/*}" --index-cache-dtype "${format#*/}"
done
step "aiter-quantized" $run --backend aiter --kv-cache-dtype "${formats%%/*}" --quantize-activations

step bench-aiter dsv41 bench attention --backend aiter --record "$record" --json
step bench-portable dsv41 bench attention --backend portable --record "$record" --json

rm -rf "$logs/checkpoint"
tar -czf "$logs.tar.gz" -C "$(dirname "$logs")" "$(basename "$logs")"
echo "report  $logs.tar.gz"
exit "$failed"
