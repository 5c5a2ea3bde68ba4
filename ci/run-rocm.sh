#!/usr/bin/env bash
# What only an AMD GPU can show: the whole suite on it, conformance, each format beside the reference, speed. One archive
# of all logs to send back.
#
#     ci/run-rocm.sh ARCH BACKEND [FOLDER for logs]      (an installed checkout; DSV41_GOLDEN_DIR adds the large cases)
. "$(dirname "$0")/steps.sh"

# Cache formats that the backend reads there, each with a format of index keys.
case "$backend $arch" in
    "aiter gfx950") formats="fp8_ds_mla/mxfp4 fp8_ds_mla/fp8 fp8_e4m3/fp8 bfloat16/fp8" record=fp8_ds_mla_v4 ;;
    "aiter gfx942") formats="fp8_e4m3/mxfp4 fp8_e4m3/fp8" record=fp8_e4m3 ;;
    *) formats="fp8_ds_mla_v4/fp8 nvfp4_ds_mla/mxfp4" record=fp8_ds_mla_v4 ;;
esac

step environment python3 -m torch.utils.collect_env
step packages python3 -m pip list
step suite python3 -P -m pytest -q -n "${JOBS:-8}"
step touch python3 -P ci/touch_kernels.py
step records python3 -P ci/record_errors.py
step check dsv41 check --backend "$backend" --full --report "$logs/check.json"

# Layers of every role in the release's geometry, long enough that the indexer leaves rows out.
step checkpoint dsv41 make-checkpoint "$logs/checkpoint" --layers 0,2,3,20,24
run="dsv41 run $logs/checkpoint --requests 2 --prompt 1500 --decode 16 --chunk 500 --verify --json --backend $backend"
for format in $formats; do
    step "${format/\//-}" $run --kv-cache-dtype "${format%/*}" --index-cache-dtype "${format#*/}"
done
step quantized $run --kv-cache-dtype "${formats%%/*}" --quantize-activations
step bench-layer dsv41 bench layer --backend "$backend" --kv-cache-dtype "${formats%%/*}" --json
step bench-index dsv41 bench index --backend "$backend" --kv-cache-dtype "${formats%%/*}" --index-cache-dtype fp8 --json

for timed in $(printf "%s\n" "$backend" portable | sort -u); do
    step "bench-$timed" dsv41 bench attention --backend "$timed" --record "$record" --json
done
rm -rf "$logs/checkpoint"
tar -czf "$logs.tar.gz" -C "$(dirname "$logs")" "$(basename "$logs")"
echo "report  $logs.tar.gz"
exit "$failed"
