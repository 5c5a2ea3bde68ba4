// Products of few tokens in bf16 and e4m3 weights with a power of two for each block of 32 x 32: sm_90a.
//
// Compiled with TOKENS (8, 16 or 32, the most of a call), MOST_WARPS, DEPTH (steps of weights that a warp has in flight),
// MOST_STEPS (of a CTA) and CTAS_PER_SM defined. A step is 128 columns.
//
// Few tokens are bound by reading the weights once. A warp has a band of 16 rows and a slice of the columns, and a ring of
// steps of them in shared memory. Each lane copies the 16 bytes of a row that its own registers take in the matrix
// instructions (m16n8k16, 16 rows of weights and 8 tokens), so no thread waits for another's, and there are no conflicts.
// (Loads into registers instead were waited for together, since a warp has six counters for what is under way, not one a load.)
// A cluster of CTAs shares the columns of its bands too. At the end, sums lie in shared memory, and every CTA adds up and
// writes a part of the rows, always in the same order.
//
// A thread of the instruction needs columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, t being its place among four. It has 16
// neighbours of 64 columns instead, of which each four are its part of an instruction. That is another order of columns,
// the same for both operands, so activations stay as they are too: what a thread needs of them for two instructions is 16
// bytes side by side.
//
// Weights do not depend on the launch ahead of this one: they are requested before it has ended, activations after.
//
// Numbers: weights are exact in bf16, and so are products in fp32, which sums are in.

#include "products.cuh"

#define STEP 128
#define CHUNKS (STEP / 64)
#define LANES (STEP / 8)     // that copy a step of a token
#define ROWS 16              // of a band
#define BLOCKS (TOKENS / 8)
#define STAGE (CHUNKS * 2 * COPY)
#define PITCH (STEP * 2 + 16)  // of a token's activations of a step: an odd number of 16, so tokens side by side share no bank
#define SUMS (ROWS + 4)      // of a token, with which two tokens of a thread's four are 8 banks apart

static_assert(MOST_STEPS % 2 == 0, "what follows their barriers is read 16 bytes at a time");

// Instructions

__device__ inline u32 load_4(const u8* from) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

__device__ inline void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Weights as bf16

// Twice the power of two whose exponent is one byte of a word, 0 for a byte of 0.
__device__ inline u32 power_pair(u32 word, u32 which) {
    u32 pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(word), "r"(which));
    return pair << 7;
}

// A scale is 2^(byte - 127), and 2^120 are to be put back. For bytes up to MOST one bf16 is enough. Those of larger ones have
// turns of their own, each of which leaves 2^LEFT more to the sums.
#define MOST 134
#define PUT_BACK 120
#define LEFT 60
#define TURNS 3
__device__ inline u32 over(u32 word, u32 most) { return __vcmpgtu4(word, most * 0x01010101u); }
__device__ inline u32 most_of(int turn) { return turn == TURNS - 1 ? 255 : MOST + turn * LEFT; }
// The bytes of a turn, with what it puts back; the others 0.
__device__ inline u32 of_turn(u32 word, int turn) {
    u32 own = ~over(word, most_of(turn)) & (turn == 0 ? ~0u : over(word, most_of(turn - 1)));
    return (word & own) + ((PUT_BACK - turn * LEFT) * 0x01010101u & own);
}

__device__ inline u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The grid is (ranks of a cluster, clusters of a group's rows, groups). A cluster has `bands` (threadIdx.z) of rows, a CTA
// of it `slices` (threadIdx.y) of the columns. Slices have `share` steps each, and the first `extra` of them one more.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, CTAS_PER_SM) products(
    const u8* weights,    // [groups * rows, columns]
    const u8* scales,     // [ceil(groups * rows / 32), columns / 32]
    int rows, int columns, int share, int extra,
    const u16* x, i64 x_stride, i64 x_group_stride, int tokens,  // [tokens, groups, columns]
    void* out, i64 out_stride, int out_is_fp32) {                // [tokens, groups * rows]
    // A barrier for each step, then the rings of all warps, then the activations of each step. Sums take the place of both.
    extern __shared__ __align__(16) u8 memory[];
    u64* barriers = (u64*)memory;
    u8* rings = memory + MOST_STEPS * 8;
    let_next_launch_begin();
    int lane = threadIdx.x, slices = blockDim.y, bands = blockDim.z;
    int slice = __shfl_sync(ALL, threadIdx.y, 0), band = __shfl_sync(ALL, threadIdx.z, 0), warp = band * slices + slice;
    int rank = blockIdx.x, ranks = gridDim.x, group = blockIdx.z, first_row = blockIdx.y * bands * ROWS;
    auto begin_of = [&](int part) { return part * share + min(part, extra); };
    int first_step = begin_of(rank * slices), begin = begin_of(rank * slices + slice);
    int steps = begin_of(rank * slices + slice + 1) - begin;

    // Rows past the end are those of the last band, which are not written again.
    u32 row = group * rows + min(first_row + band * ROWS, rows - ROWS);
    u32 from = (row + lane / 4) * columns + begin * STEP + lane % 4 * 16;
    u32 ring = address(rings) + warp * DEPTH * STAGE + lane * 16;
    auto load = [&](int step, u32 to) {
#pragma unroll
        for (int n = 0; n < CHUNKS * 2; n++)
            copy_weights(to + n * COPY, weights + from + n % 2 * 8 * columns + step * STEP + n / 2 * 64);
    };
    auto begin_loading = [&]() {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (d < steps) load(d, ring + d * STAGE);
            copies_end();
        }
    };
    begin_loading();

    // A lane has the scales of a step.
    u32 scale = load_4(scales + (row / 32 * (columns / STEP) + begin + min(lane, steps - 1)) * (STEP / 32));

    u64* full = barriers + (begin - first_step);
    if (band == 0 && lane == 0) {
#pragma unroll 1
        for (int step = 0; step < steps; step++) barrier_init(full + step, bands * 32);
    }
    __syncthreads();
    wait_for_launch_ahead();

    // The warps of a slice copy its activations: some tokens at a time, a lane 16 bytes of a step. What is in the place of
    // tokens past the last makes sums that nobody reads.
    const int places = TOKENS == 8 ? tokens : TOKENS;  // in a step
    u32 place = address(rings) + slices * bands * DEPTH * STAGE + (begin - first_step) * places * PITCH;
    const u16* activations = x + group * x_group_stride + begin * STEP + lane % LANES * 8;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
#pragma unroll 1
        for (int token = (band * 32 + lane) / LANES; token < tokens; token += bands * 32 / LANES)
            copy_16(place + (step * places + token) * PITCH + lane % LANES * 16, activations + token * x_stride + step * STEP, 16);
        barrier_arrive_after_copies(full + step);
    }

    float sums[BLOCKS][4] = {};
    u32 which = 0x4040 + lane % 4 / 2 * 0x0101;  // of the scales of a step, in its first 64 columns
    int turn = 0;
    while (__any_sync(ALL, over(scale, most_of(turn)))) turn++;
    while (true) {
        u32 powers = of_turn(scale, turn);
        u32 at = place + min(lane / 4, places - 1) * PITCH + lane % 4 * 32, stage = ring;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            u32 word = __shfl_sync(ALL, powers, step);
            copies_wait<DEPTH - 1>();
            barrier_wait(full + step, 0);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const u32 by = power_pair(word, which + chunk * 0x0202), half = stage + chunk * 2 * COPY;
                const uint4 raw[2] = {load_shared_4(half), load_shared_4(half + COPY)};
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    u32 a[2][4];
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        a[n / 4][n % 4] = scaled(widened(word_of(raw[n % 2], pair * 2 + n / 4), n % 4 / 2), by);
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++) {
                        uint4 b = load_shared_4(at + block * 8 * PITCH + chunk * 128 + pair * 16);
                        multiply(sums[block], a[0], b.x, b.y);
                        multiply(sums[block], a[1], b.z, b.w);
                    }
                }
            }
            // The products have begun, so what was read has arrived.
            if (step + DEPTH < steps) load(step + DEPTH, stage);
            copies_end();
            at += places * PITCH;
            stage = stage == ring + (DEPTH - 1) * STAGE ? ring : stage + STAGE;
        }
        if (turn == 0) break;
        turn--;
#pragma unroll
        for (int n = 0; n < BLOCKS * 4; n++) sums[n / 4][n % 4] *= __int_as_float(LEFT + 127 << 23);
        copies_wait<0>();
        begin_loading();
    }

    // Sums take the place of what other warps may still read, or copy.
    copies_wait<0>();
    __syncthreads();
    const int part = TOKENS * SUMS;  // of a warp
    float* sums_of_all = (float*)rings;
    float* to = sums_of_all + warp * part + lane % 4 * 2 * SUMS + lane / 4;
#pragma unroll
    for (int n = 0; n < BLOCKS * 4; n++) to[(n / 4 * 8 + n % 2) * SUMS + n % 4 / 2 * 8] = sums[n / 4][n % 4];
    if (ranks > 1) cluster_meet();
    else __syncthreads();

    // Warps of all CTAs take turns at tokens, a lane four rows.
    int live_rows = min(bands * ROWS, rows - first_row), warps = slices * bands;
    for (int token = rank * warps + warp; token < tokens; token += ranks * warps) {
#pragma unroll 1
        for (int at = lane * 4; at < live_rows; at += 128) {
            u32 first = address(sums_of_all + at / ROWS * slices * part + token * SUMS + at % ROWS);
            int part_slice = 0, part_rank = 0;
            float4 sum = {0, 0, 0, 0};
#pragma unroll 1
            while (part_rank < ranks) {
                float4 v[PARTS_AT_ONCE] = {};
#pragma unroll
                for (int i = 0; i < PARTS_AT_ONCE; i++) {
                    if (part_rank < ranks) v[i] = load_remote_4(in_rank(first + part_slice * part * 4, part_rank));
                    if (++part_slice == slices) part_slice = 0, part_rank++;
                }
#pragma unroll
                for (int i = 0; i < PARTS_AT_ONCE; i++) sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
            }
            i64 where = token * out_stride + (i64)group * rows + first_row + at;
            if (out_is_fp32) *(float4*)((float*)out + where) = sum;
            else *(uint2*)((u16*)out + where) = {pair_of(sum.x, sum.y), pair_of(sum.z, sum.w)};
        }
    }
    // Before what others read is gone.
    if (ranks > 1) cluster_arrive_relaxed(), cluster_wait();
}
