// Activations in the order in which products_wide.cu takes them: sm_90a.
//
// A matrix of 64 columns ("step") and `tile` tokens is one block, tokens one after another. A thread t of the four that
// have a row of weights has 16 neighbours of 64 columns, and in the instruction j of four takes columns 16t + 4j + 0, 1, 2
// and 3 of them as its columns 2t, 2t + 1, 2t + 8 and 2t + 9. So of the 32 pairs of columns, the instruction j takes 8t + 2j of
// all t, then 8t + 2j + 1: 16 bytes each, which a thread here has to itself. Chunks of 16 bytes are swizzled as the
// instruction wants them.

#include "common.cuh"

#define STEP 64
#define ROW (STEP * 2)

// A grid of (all threads of a group, 1, groups). `packed` is [groups, tiles, steps, tile, ROW bytes]; tokens past the last
// stay as they are.
extern "C" __global__ void __launch_bounds__(256) products_pack(
    const u8* x, i64 stride, i64 group_stride, int tokens, int steps, int tile, u8* packed) {  // strides in bytes
    let_next_launch_begin();
    u32 i = blockIdx.x * 256 + threadIdx.x, j = i % 4, step = i / 4 % steps, token = i / 4 / steps, tiles = (tokens + tile - 1) / tile;
    wait_for_launch_ahead();
    if (token >= tokens) return;
    const u8* from = x + blockIdx.z * group_stride + token * stride + step * ROW + j * 8;
    uint2 pairs[4];
#pragma unroll
    for (int t = 0; t < 4; t++) pairs[t] = *(const uint2*)(from + t * 32);
    u32 row = token % tile;
    u8* to = packed + (((i64)(blockIdx.z * tiles + token / tile) * steps + step) * tile + row) * ROW;
    *(uint4*)(to + (2 * j ^ row % 8) * 16) = {pairs[0].x, pairs[1].x, pairs[2].x, pairs[3].x};
    *(uint4*)(to + (2 * j + 1 ^ row % 8) * 16) = {pairs[0].y, pairs[1].y, pairs[2].y, pairs[3].y};
}
