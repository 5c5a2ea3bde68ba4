// Products of some hundred tokens in bf16 and e4m3 weights with a power of two for each block of 32 x 32: sm_90a.
//
// Compiled with TOKENS (64 or 128, of a CTA), GROUPS (of four warps, the most of a CTA that multiply), STAGES (steps of
// activations on their way or in use) and DEPTH (steps of weights that a warp has in flight) defined. A step is 64 columns.
//
// The long side of the matrix instructions (wgmma, m64nNk16) is 64 rows of weights, which come from registers; the other is
// tokens, which lie in shared memory. A warp has 16 rows, and as in products.cu each lane copies the 16 bytes of a row that
// its own registers take, so no thread waits for another's weights. A step's weights are widened while the products of the
// last one run.
//
// Activations were put in order by products_pack.cu. One thread brings a step of them by one bulk copy. That writes as
// the matrix unit reads, so there is no fence between the two.
//
// A CTA has `bands` of 64 rows and `slices` of the columns: groups that have the same band take turns at steps. A cluster
// of CTAs cuts the columns too. At the end, sums lie in shared memory, slices are added there, and every CTA adds up and
// writes some of the tokens, always in the same order.
//
// Weights do not depend on the launch ahead of this one: they are requested before it has ended, activations after.
//
// Numbers: weights are exact in bf16, as far as its range goes, and so are products in fp32, which sums are in.

#include "products.cuh"

#define GROUP 128
#define ROWS 64               // of a group
#define STEP 64
#define STAGE (TOKENS * 128)  // bytes of activations
#define SLOT (2 * COPY + 128) // of a warp's weights, and the scales that each lane has for itself
// Registers of a thread, after a start at 96.
#define FEW_REGISTERS 24
#define MANY_REGISTERS 112
#define BARRIERS 1024         // bytes, after which stages are aligned
#define PITCH (ROWS + 4)      // of a token's sums, with which two tokens of a thread's four are 8 banks apart

static_assert(TOKENS == 64 || TOKENS == 128, "another matrix instruction");
static_assert(2 * STAGES * 8 <= BARRIERS, "too many stages");

// Instructions

__device__ inline void copy_bulk(u32 to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ inline void copy_4(u32 to, const u8* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline u32 load_shared(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
}

__device__ inline void meet(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Matrix operands lie as rows of 128 bytes (64 columns), eight rows to 1024 bytes, in which 16-byte chunk c of row r is
// at place c ^ (r & 7).
__device__ inline u64 operand(u32 at) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | (u64)(1024 >> 4) << 32 | (at & 0x3ffff) >> 4;
}

__device__ inline void matrices_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void matrices_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define IO_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define IO_16(x, i) IO_4(x, i), IO_4(x, i + 4), IO_4(x, i + 8), IO_4(x, i + 12)
#define IO_32(x, i) IO_16(x, i), IO_16(x, i + 16)
#if TOKENS == 64
#define IO_SUMS(x) IO_32(x, 0)
#else
#define IO_SUMS(x) IO_32(x, 0), IO_32(x, 32)
#endif

__device__ inline void multiply(float (&x)[TOKENS / 2], const u32* a, u64 b) {
#if TOKENS == 64
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n"
#else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;\n"
#endif
        : IO_SUMS(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// All products but those of the last commit are done.
__device__ inline void matrices_wait_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
// The sums are named, for nothing to look at them earlier.
__device__ inline void matrices_wait(float (&x)[TOKENS / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : IO_SUMS(x)::"memory");
}

// The weights of a lane for two instructions: of eight of its columns, each four are one of them.
__device__ inline void widen(u32 (&a)[8], u32 upper, u32 lower, u32 next_upper, u32 next_lower, u32 byte) {
    const u32 words[2][2] = {{upper, lower}, {next_upper, next_lower}};
    u32 by = scale_pair(byte);
#pragma unroll
    for (int n = 0; n < 8; n++) a[n] = scaled(widened(words[n / 4][n % 2], n % 4 / 2), by);
    if (__any_sync(ALL, byte > MOST_AT_ONCE)) {
        by = rest_pair(byte);
#pragma unroll
        for (int n = 0; n < 8; n++) a[n] = scaled(a[n], by);
    }
}

// The grid is (ranks of a cluster, clusters of a group's rows x tiles of tokens, groups). The cluster's ranks have `share`
// steps each, and the first `extra` of them one more. `slices` divide STAGES, so that a stage is always the same slice's, and
// are less, since a slice keeps a stage until its next one is there. Behind the groups of warps that multiply is one warp that copies.
extern "C" __global__ void __launch_bounds__((GROUPS + 1) * GROUP, 1) products_wide(
    const u8* weights,    // [groups * rows, columns]
    const u8* scales,     // [ceil(groups * rows / 32), columns / 32]
    int rows, int columns, int bands, int slices, int share, int extra,
    const u8* packed, int tokens,                    // [groups, tiles, steps, TOKENS, 128 bytes]
    void* out, i64 out_stride, int out_is_fp32) {    // [tokens, groups * rows]
    // Barriers, then stages of activations, then the rings of all warps. Sums take the place of the last two.
    extern __shared__ __align__(1024) u8 memory[];
    u64 *full = (u64*)memory, *empty = full + STAGES;
    u8 *stages = memory + BARRIERS, *rings = stages + STAGES * STAGE;
    let_next_launch_begin();
    // The same in all lanes, which the compiler must know, or it guards matrix instructions by branches.
    int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int warps = bands * slices * 4, band = warp / 4 % bands, slice = warp / 4 / bands;
    int rank = blockIdx.x, ranks = gridDim.x, group = blockIdx.z, tiles = (tokens + TOKENS - 1) / TOKENS, tile = blockIdx.y % tiles;
    int first_row = blockIdx.y / tiles * bands * ROWS, first_token = tile * TOKENS, live_tokens = min(TOKENS, tokens - first_token);
    int begin = rank * share + min(rank, extra), steps = share + (rank < extra);
    int own = max(steps - slice + slices - 1, 0) / slices;  // steps of this slice

    // Rows past the end are those of the last 16, which are not written again.
    u32 row = group * rows + min(first_row + band * ROWS + warp % 4 * 16, rows - 16);
    const u8* from = weights + ((row + lane / 4) * (u32)columns + (begin + slice) * STEP + lane % 4 * 16);
    const u8* scales_from = scales + row / 32 * (columns / 32);
    u32 ring = address(rings) + warp * DEPTH * SLOT + lane * 16, to_scales = 2 * COPY - lane * 12;
    auto load = [&](int n, u32 to) {
        copy_weights(to, from + n * slices * STEP);
        copy_weights(to + COPY, from + n * slices * STEP + 8 * columns);
        copy_4(to + to_scales, scales_from + (begin + slice + n * slices) / 2 * 4);  // of two steps
    };
    if (warp < warps)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (d < own) load(d, ring + d * SLOT);
            copies_end();
        }
    if (threadIdx.x == 0) {
        if (address(memory) % 1024) __trap();
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, bands * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= warps) {
        set_registers<FEW_REGISTERS>(false);
        if (warp == warps && lane == 0) {
            wait_for_launch_ahead();
            const u8* at = packed + ((i64)(group * tiles + tile) * (columns / STEP) + begin) * STAGE;
            int stage = 0;
            u32 phase = 1;  // a fresh barrier lets the first round pass
            for (int step = 0; step < steps; step++) {
                barrier_wait(empty + stage, phase);
                barrier_expect(full + stage, live_tokens * 128);
                // What is in the place of tokens past the last makes sums that nobody reads.
                copy_bulk(address(stages + stage * STAGE), at, live_tokens * 128, full + stage);
                at += STAGE;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }
    set_registers<MANY_REGISTERS>(true);

    float sums[TOKENS / 2] = {};  // [block of 8 tokens][row g, g + 8][token 2t, 2t + 1]
    int stage = slice, last = 0;
    u32 phase = 0, at = ring;
    // What one has of weights is in use while the other is widened.
    u32 first_half[8], second_half[8];
#pragma unroll 1
    for (int n = 0; n < own; n++) {
        copies_wait<DEPTH - 1>();
        uint4 upper = load_shared_4(at), lower = load_shared_4(at + COPY);
        u32 which = (begin + slice + n * slices) % 2 * 2 + lane % 4 / 2, byte = load_shared(at + to_scales) >> 8 * which & 255;
        matrices_wait_but_last();
        widen(first_half, upper.x, lower.x, upper.y, lower.y, byte);
        barrier_wait(full + stage, phase);
        u64 b = operand(address(stages + stage * STAGE));
        matrices_begin();
        multiply(sums, first_half, b);
        multiply(sums, first_half + 4, b + (32 >> 4));
        matrices_commit();

        matrices_wait_but_last();
        if (n > 0 && lane == 0) barrier_arrive(empty + last);
        widen(second_half, upper.z, lower.z, upper.w, lower.w, byte);
        matrices_begin();
        multiply(sums, second_half, b + (64 >> 4));
        multiply(sums, second_half + 4, b + (96 >> 4));
        matrices_commit();

        if (n + DEPTH < own) load(n + DEPTH, at);
        copies_end();
        at = at == ring + (DEPTH - 1) * SLOT ? ring : at + SLOT;
        last = stage;
        stage += slices;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
    matrices_wait(sums);

    // Sums take the place of what other groups read.
    const int part = TOKENS * PITCH;  // of a band
    float *sums_of_all = (float*)stages, *to = sums_of_all + band * part + lane % 4 * 2 * PITCH + warp % 4 * 16 + lane / 4;
    auto place_of = [](int n) { return (n / 4 * 8 + n % 2) * PITCH + n % 4 / 2 * 8; };
#pragma unroll 1
    for (int turn = 0; turn < slices; turn++) {
        meet(warps * 32);
        if (turn != slice) continue;
        if (turn > 0)
#pragma unroll
            for (int n = 0; n < TOKENS / 2; n++) sums[n] += to[place_of(n)];
#pragma unroll
        for (int n = 0; n < TOKENS / 2; n++) to[place_of(n)] = sums[n];
    }
    if (ranks > 1) cluster_meet();
    else meet(warps * 32);

    wait_for_launch_ahead();  // which has ended, or there were no activations; now this thread may write too

    // Warps of all CTAs take turns at tokens, a lane four rows.
    int live_rows = min(bands * ROWS, rows - first_row);
    for (int token = rank * warps + warp; token < live_tokens; token += ranks * warps) {
#pragma unroll 1
        for (int in_band = lane * 4; in_band < live_rows; in_band += 128) {
            u32 first = address(sums_of_all + in_band / ROWS * part + token * PITCH + in_band % ROWS);
            float4 sum = {0, 0, 0, 0};
#pragma unroll 1
            for (int r = 0; r < ranks; r += PARTS_AT_ONCE) {
                float4 v[PARTS_AT_ONCE] = {};
#pragma unroll
                for (int i = 0; i < PARTS_AT_ONCE; i++)
                    if (r + i < ranks) v[i] = load_remote_4(in_rank(first, r + i));
#pragma unroll
                for (int i = 0; i < PARTS_AT_ONCE; i++) sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
            }
            i64 where = (first_token + token) * out_stride + (i64)group * rows + first_row + in_band;
            if (out_is_fp32) *(float4*)((float*)out + where) = sum;
            else *(uint2*)((u16*)out + where) = {pair_of(sum.x, sum.y), pair_of(sum.z, sum.w)};
        }
    }
    // Before what others read is gone.
    if (ranks > 1) cluster_arrive_relaxed(), cluster_wait();
}
