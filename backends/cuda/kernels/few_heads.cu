// Sparse multi-query attention over the 584-byte record for few query heads: sm_90 and newer.
//
// Compiled with HEADS (8 or 16: the columns of the matrix instructions), STAGES (tiles in flight), SHARED_BYTES (what a
// launch gives), those of the record (DIMS, ROW_BYTES, SCALE_BYTES) and the distance of rows in shared memory, PITCH,
// defined.
//
// With few heads the work is moving rows: 576 bytes a key against 8 or 16 columns of products. So rows stay fp8 in
// shared memory, as they lie in the cache, and are widened in registers on their way into the matrix instructions,
// whose long side (M = 16) is keys for the scores and dims for the sums. A token's keys are cut into tiles of 32.
//
//   warp 4      fetches: one bulk copy a row, one 8-byte copy of its scales, STAGES tiles ahead
//   warps 0-3   scores: 16 keys (warp & 1) over half of the dims (warp >> 1), exchanged through shared memory
//               softmax: all of the tile's 32 keys, by every warp for itself
//               sums: 128 dims a warp
//
// A cluster of CTAs may share a token: each takes some of its tiles, and they add their sums up at the end.
//
// Numbers: an e4m3 byte becomes a bf16 by moving its bits, which divides it by 2^120, exactly, subnormals too. The other
// operand, the query or a weight times its key's scale, is a bf16 and is multiplied by 2^60, so that fp32 sums stay in
// the middle of their range; the other 2^60 is put back at the end. Scales may be anything: those of the keys enter the
// scores as fp32, and the weights relative to the largest that a group of dims has had so far, as a running maximum.

#include "common.cuh"

#define CODED 448
// Scores at a distance of 40 words a head: four heads of eight keys are 32 banks.
#define SCORE_PITCH 40
#define N_TILES (HEADS / 8)
#define COMPUTE_WARPS 4
#define THREADS (32 * (COMPUTE_WARPS + 1))
#define HALF 1.152921504606846976e18f  // 2^60

struct Tile {
    u8 rows[KEYS * PITCH];
    u8 scales[KEYS * SCALE_BYTES];
};

// What a CTA has of a token when its tiles are done, for the other CTAs of its cluster.
struct Part {
    float sums[HEADS][DIMS + 4];  // relative to 2^top; four heads that are two apart have 32 banks
    float top[HEADS], total[HEADS];
    float factor[MAX_RANKS][HEADS];
};

struct Shared {
    union __align__(16) {
        Tile tiles[STAGES];
        Part part;
    };
#if HEADS > 8
    __align__(16) u32 query[DIMS / 32][N_TILES][32][4];  // in the order of the registers that take it
#endif
    float scores[2][2][HEADS * SCORE_PITCH];  // of alternating tiles, of each half of the dims
    u64 full[STAGES], empty[STAGES];
    u32 live[STAGES];  // a bit for each key of a tile that is one
};
static_assert(KEYS == 32, "a lane fetches a row");
static_assert(DIMS == 512 && SCALE_BYTES == 8 && ROW_BYTES == CODED + 2 * (DIMS - CODED), "another record");
static_assert(PITCH / 4 % 32 % 8 == 4, "eight rows start in eight different groups of four banks");
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");

// Instructions

__device__ inline void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
        "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ inline void copy_8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address(to)), "l"(from) : "memory");
}

__device__ inline void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

__device__ inline void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

__device__ inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The bytes 0 and 2, and 1 and 3, of a word of e4m3 as two bf16, over 2^120: sign to sign, the rest four bits lower.
__device__ inline u32 even_bytes(u32 w) {
    u32 wide;  // with the sign in all of the upper byte
    asm("prmt.b32 %0, %1, 0, 0xa280;" : "=r"(wide) : "r"(w));
    return (wide << 4) & 0x87f087f0u;
}
__device__ inline u32 odd_bytes(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u); }

// 2^(byte - 127); byte 0 is a subnormal of fp32.
__device__ inline float scale_of(u32 byte) { return __int_as_float(max((int)(byte << 23), 0x00400000)); }

__device__ inline void compute_warps_meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// The tiles of one token that this CTA has

struct Tiles {
    int window_keys, compressed_keys;
    int window_tiles;
    int first, last;

    __device__ Tiles(const Cache& window, const Cache& compressed, int token, u32 rank, u32 ranks) {
        window_keys = min(window.lengths[token], window.width);
        compressed_keys = compressed.width ? min(compressed.lengths[token], compressed.width) : 0;
        window_tiles = (window_keys + KEYS - 1) / KEYS;
        int all = window_tiles + (compressed_keys + KEYS - 1) / KEYS;
        first = all * rank / ranks;
        last = all * (rank + 1) / ranks;
    }
};

// The slot that lane `lane` fetches of a tile, -1 for none.
__device__ inline int slot_of(const Cache& window, const Cache& compressed, const Tiles& t, int token, int tile, int lane) {
    bool in_window = tile < t.window_tiles;
    Cache cache = one_of(in_window, window, compressed);
    int key = (in_window ? tile : tile - t.window_tiles) * KEYS + lane;
    if (tile >= t.last || key >= (in_window ? t.window_keys : t.compressed_keys)) return -1;
    int slot = cache.indices[(i64)token * cache.width + key];
    return (u32)slot < cache.rows ? slot : -1;
}

// A row's fetch is begun, or where there is none its numbers are made such that they do no harm: the scale and the
// rotated dims, which are the bytes that can be NaN.
__device__ inline void fetch_row(const Cache& cache, Tile& tile, int slot, int lane, u64* full) {
    u8* row = tile.rows + lane * PITCH;
    u8* scales = tile.scales + lane * SCALE_BYTES;
    if (slot >= 0) {
        u32 page = (u32)slot / cache.page_size, place = (u32)slot - page * cache.page_size;
        const u8* from = cache.data + page * cache.page_stride;
        copy_bulk(row, from + place * ROW_BYTES, ROW_BYTES, full);
        copy_8(scales, from + cache.page_size * ROW_BYTES + place * SCALE_BYTES);
        barrier_arrive_after_copies(full);
    } else {
        *(u64*)scales = 0;
        for (int i = 0; i < ROW_BYTES - CODED; i += 16) *(uint4*)(row + CODED + i) = make_uint4(0, 0, 0, 0);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before a later bulk copy to the same place
        barrier_arrive(full);
    }
}

__device__ inline void fetch(Shared& s, const Cache& window, const Cache& compressed, int num_tokens, int lane) {
    u32 ranks = cluster_size(), rank = cluster_rank();
    int stage = 0;
    u32 phase = 1;  // a fresh barrier lets the first round pass
    for (int token = blockIdx.x / ranks; token < num_tokens; token += gridDim.x / ranks) {
        Tiles t(window, compressed, token, rank, ranks);
        // Two tiles ahead, so that no index is waited for.
        int next = slot_of(window, compressed, t, token, t.first, lane);
        int after = slot_of(window, compressed, t, token, t.first + 1, lane);
        for (int tile = t.first; tile < t.last; tile++) {
            int slot = next;
            next = after;
            after = slot_of(window, compressed, t, token, tile + 2, lane);
            u32 live = __ballot_sync(0xffffffffu, slot >= 0);
            barrier_wait(&s.empty[stage], phase);
            if (lane == 0) {
                s.live[stage] = live;
                barrier_expect(&s.full[stage], __popc(live) * ROW_BYTES);
            }
            __syncwarp();
            fetch_row(one_of(tile < t.window_tiles, window, compressed), s.tiles[stage], slot, lane, &s.full[stage]);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// The query, as the scores' matrix instructions take it: for 32 dims the four registers of two of them, whose first
// takes the even dims of each four and whose second the odd ones, as `even_bytes` and `odd_bytes` deliver the keys.
// The rotated dims are bf16 in the cache and come in their own order.

__device__ inline void query_registers(u32 (&r)[4], const u16* head, bool live, int first, int t) {
    if (!live) {
        r[0] = r[1] = r[2] = r[3] = 0;
    } else if (first >= CODED) {
        // Their keys are not over 2^120, so they are, for all sums to be.
        const u32* pairs = (const u32*)(head + first + 2 * t);
        for (int i = 0; i < 4; i++) r[i] = pair_of(low_of(pairs[4 * i]) / HALF, high_of(pairs[4 * i]) / HALF);
    } else {
        for (int i = 0; i < 2; i++) {
            uint2 four = *(const uint2*)(head + first + 16 * i + 4 * t);
            r[2 * i] = pair_of(low_of(four.x) * HALF, low_of(four.y) * HALF);
            r[2 * i + 1] = pair_of(high_of(four.x) * HALF, high_of(four.y) * HALF);
        }
    }
}

// Scores of 16 keys over half of the dims, over 2^60.

struct Query {
#if HEADS > 8
    const u32 (*fragments)[N_TILES][32][4];
#else
    u32 fragments[8][4];
#endif
};

__device__ inline void take_query(u32 (&r)[4], const Query& query, int part, int n, int half, int lane) {
#if HEADS > 8
    uint4 four = *(const uint4*)query.fragments[half * 8 + part][n][lane];
    r[0] = four.x, r[1] = four.y, r[2] = four.z, r[3] = four.w;
#else
    for (int i = 0; i < 4; i++) r[i] = query.fragments[part][i];
#endif
}

__device__ inline void score(float (&scores)[N_TILES][4], const Tile& tile, const Query& query, int warp, int lane) {
    int half = warp >> 1, group = lane >> 2, first_key = (warp & 1) * 16;
    u32 rows = address(tile.rows) + (first_key + (lane & 15)) * PITCH + (lane >> 4) * 16;
    u64 scales_low = *(const u64*)(tile.scales + (first_key + group) * SCALE_BYTES);
    u64 scales_high = *(const u64*)(tile.scales + (first_key + group + 8) * SCALE_BYTES);
    u32 four_low = half ? (u32)(scales_low >> 32) : (u32)scales_low;
    u32 four_high = half ? (u32)(scales_high >> 32) : (u32)scales_high;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
        for (int i = 0; i < 4; i++) scores[n][i] = 0;
#pragma unroll
    for (int part = 0; part < 4; part++) {  // 64 dims, which have one scale
        float sums[N_TILES][4] = {};
        bool coded = half == 0 || part < 3;
        if (coded) {
#pragma unroll
            for (int step = 0; step < 2; step++) {
                u32 k[4], q[4];
                load_matrices(k, rows + half * 256 + part * 64 + step * 32);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    take_query(q, query, part * 2 + step, n, half, lane);
                    multiply(sums[n], even_bytes(k[0]), even_bytes(k[1]), odd_bytes(k[0]), odd_bytes(k[1]), q[0], q[1]);
                    multiply(sums[n], even_bytes(k[2]), even_bytes(k[3]), odd_bytes(k[2]), odd_bytes(k[3]), q[2], q[3]);
                }
            }
            float low = scale_of((four_low >> (8 * part)) & 255), high = scale_of((four_high >> (8 * part)) & 255);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                scores[n][0] += sums[n][0] * low, scores[n][1] += sums[n][1] * low;
                scores[n][2] += sums[n][2] * high, scores[n][3] += sums[n][3] * high;
            }
        } else {
#pragma unroll
            for (int step = 0; step < 4; step++) {
                u32 k[4], q[4];
                load_matrices(k, rows + CODED + step * 32);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    take_query(q, query, part * 2 + step / 2, n, half, lane);
                    multiply(scores[n], k[0], k[1], k[2], k[3], q[step % 2 * 2], q[step % 2 * 2 + 1]);
                }
            }
        }
    }
}

// The softmax of a tile's scores, unnormalised and relative to a running maximum. A thread has one head of each n, and
// of its keys 2t, 2t + 1, 2t + 8, 2t + 9, and the four that are 16 more: what a sum's matrix instruction takes from it.

struct Softmax {
    float top[N_TILES], total[N_TILES];  // in powers of 2; of this thread's keys

    __device__ void begin() {
        for (int n = 0; n < N_TILES; n++) top[n] = -INFINITY_F, total[n] = 0;
    }
};

// Returns whether sums up to now must be multiplied by `shrink`.
__device__ inline bool soften(float (&weights)[N_TILES][8], float (&shrink)[N_TILES], Softmax& softmax, const float (&scores)[2][HEADS * SCORE_PITCH], u32 live, float scale, int lane) {
    int head = lane >> 2, t = lane & 3;
    bool moved = false;
    live >>= 2 * t;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        float x[8], largest = -INFINITY_F;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            int at = (n * 8 + head) * SCORE_PITCH + 8 * (i / 2) + 2 * t;
            float2 a = *(const float2*)&scores[0][at], b = *(const float2*)&scores[1][at];
            x[i] = live >> (4 * i) & 1 ? (a.x + b.x) * scale : -INFINITY_F;
            x[i + 1] = live >> (4 * i + 1) & 1 ? (a.y + b.y) * scale : -INFINITY_F;
            largest = fmaxf(largest, fmaxf(x[i], x[i + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        shrink[n] = 1;
        if (largest > softmax.top[n] + SLACK) {
            shrink[n] = power_of_2(softmax.top[n] - largest);
            softmax.total[n] *= shrink[n];
            softmax.top[n] = largest;
            moved = true;
        }
        float base = softmax.top[n] == -INFINITY_F ? 0 : softmax.top[n];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            weights[n][i] = power_of_2(x[i] - base);
            softmax.total[n] += weights[n][i];
        }
    }
    return __any_sync(0xffffffffu, moved);
}

// Weighted sums of 64 dims, [part of 16 dims][n]. Of a thread: dims 2g and 2g + 1 of the part (coded) or g and g + 8
// (rotated), for the heads 2t and 2t + 1.
typedef float Sums[4][N_TILES][4];

__device__ inline void multiply_sums(Sums& sums, const float (&by)[N_TILES], float all, int lane) {
    int t = lane & 3;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        float first = __shfl_sync(0xffffffffu, by[n], 8 * t) * all, second = __shfl_sync(0xffffffffu, by[n], 8 * t + 4) * all;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            sums[part][n][0] *= first, sums[part][n][2] *= first;
            sums[part][n][1] *= second, sums[part][n][3] *= second;
        }
    }
}

// Adds a tile's rows in the 64 dims of a group to sums that are over 2^60 and relative to the scale byte `largest`.
__device__ inline void mix_coded(Sums& sums, u32& largest, const Tile& tile, const u32 (&both)[8], const float (&weights)[N_TILES][8], int group, int lane) {
    u32 scales[8], found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        scales[i] = group & 1 ? both[i] >> 8 : both[i] & 255;
        found = max(found, scales[i]);
    }
    found = __reduce_max_sync(0xffffffffu, found);
    if (found > largest) {
        float one[N_TILES];
        for (int n = 0; n < N_TILES; n++) one[n] = 1;
        multiply_sums(sums, one, power_of_2((float)(int)(largest - found)), lane);
        largest = found;
    }
    u32 b[N_TILES][4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float first = __int_as_float(max((int)(scales[i] - largest) + 187, 0) << 23);  // 2^(difference + 60)
        float second = __int_as_float(max((int)(scales[i + 1] - largest) + 187, 0) << 23);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) b[n][i / 2] = pair_of(weights[n][i] * first, weights[n][i + 1] * second);
    }
    u32 rows = address(tile.rows) + lane * PITCH + group * 64;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        u32 v[4];
        load_transposed(v, rows + part * 16);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            multiply(sums[part][n], even_bytes(v[0]), odd_bytes(v[0]), even_bytes(v[1]), odd_bytes(v[1]), b[n][0], b[n][1]);
            multiply(sums[part][n], even_bytes(v[2]), odd_bytes(v[2]), even_bytes(v[3]), odd_bytes(v[3]), b[n][2], b[n][3]);
        }
    }
}

__device__ inline void mix_rotated(Sums& sums, const Tile& tile, const float (&weights)[N_TILES][8], int lane) {
    u32 b[N_TILES][4];
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
        for (int i = 0; i < 4; i++) b[n][i] = pair_of(weights[n][2 * i], weights[n][2 * i + 1]);
    u32 rows = address(tile.rows) + ((lane & 7) + (lane >> 4) * 8) * PITCH + CODED + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32 v[4];
            load_transposed(v, rows + step * 16 * PITCH + part * 32);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) multiply(sums[part][n], v[0], v[1], v[2], v[3], b[n][2 * step], b[n][2 * step + 1]);
        }
}

// The sums, as they go to the output or to the other CTAs of the cluster: `put(head, dim, of dim, of dim + 1)`.
template <class Put>
__device__ inline void put_sums(const Sums& sums, int group, bool rotated, int lane, Put put) {
    int g = lane >> 2, t = lane & 3;
    bool odd = g & 1;
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int head = n * 8 + 2 * t + i, dim = group * 64 + part * 16;
                float first = sums[part][n][i], second = sums[part][n][i + 2];
                if (rotated) {
                    // Of dims g and g + 8; of two neighbours the even g takes both lower ones, the odd one both upper.
                    float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
                    put(head, dim + (odd ? g + 7 : g), odd ? other : first, odd ? second : other);
                } else {
                    put(head, dim + 2 * g, first, second);
                }
            }
}

__device__ inline void compute(Shared& s, const Cache& window, const Cache& compressed, const u16* q, i64 q_token, i64 q_head,
                               const Output& out, float scale, int num_tokens, int warp, int lane) {
    u32 ranks = cluster_size(), rank = cluster_rank();
    int half = warp >> 1, g = lane >> 2, t = lane & 3;
    int stage = 0;
    u32 phase = 0, turn = 0;
    for (int token = blockIdx.x / ranks; token < num_tokens; token += gridDim.x / ranks) {
        const u16* row = q + token * q_token;
        Query query;
#if HEADS > 8
        for (int i = warp * 32 + lane; i < DIMS / 32 * N_TILES * 32; i += COMPUTE_WARPS * 32) {
            int l = i & 31, n = (i >> 5) % N_TILES, part = (i >> 5) / N_TILES, head = n * 8 + (l >> 2);
            u32 r[4];
            query_registers(r, row + head * q_head, head < out.num_heads, part * 32, l & 3);
            *(uint4*)s.query[part][n][l] = make_uint4(r[0], r[1], r[2], r[3]);
        }
        query.fragments = s.query;
        compute_warps_meet();
#else
#pragma unroll
        for (int part = 0; part < 8; part++) query_registers(query.fragments[part], row + g * q_head, g < out.num_heads, half * 256 + part * 32, t);
#endif
        Tiles tiles(window, compressed, token, rank, ranks);
        Softmax softmax;
        softmax.begin();
        Sums left = {}, right = {};
        u32 largest_left = 0, largest_right = 0;
        for (int tile = tiles.first; tile < tiles.last; tile++) {
            barrier_wait(&s.full[stage], phase);
            const Tile& rows = s.tiles[stage];
            float scores[N_TILES][4];
            score(scores, rows, query, warp, lane);
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.scores[turn][half][(n * 8 + 2 * t + (i & 1)) * SCORE_PITCH + (warp & 1) * 16 + g + 8 * (i >> 1)] = scores[n][i];
            u32 live = s.live[stage];
            compute_warps_meet();
            float weights[N_TILES][8], shrink[N_TILES];
            if (soften(weights, shrink, softmax, s.scores[turn], live, scale, lane)) {
                multiply_sums(left, shrink, 1, lane);
                multiply_sums(right, shrink, 1, lane);
            }
            u32 scales[8];  // of the keys of `weights`, of both groups
#pragma unroll
            for (int i = 0; i < 8; i++) scales[i] = *(const u16*)(rows.scales + ((i >> 1) * 8 + 2 * t + (i & 1)) * SCALE_BYTES + 2 * warp);
            mix_coded(left, largest_left, rows, scales, weights, 2 * warp, lane);
            if (warp < COMPUTE_WARPS - 1) mix_coded(right, largest_right, rows, scales, weights, 2 * warp + 1, lane);
            else mix_rotated(right, rows, weights, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(&s.empty[stage]);
            turn ^= 1;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

        float one[N_TILES];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            one[n] = 1;
            softmax.total[n] += __shfl_xor_sync(0xffffffffu, softmax.total[n], 1);
            softmax.total[n] += __shfl_xor_sync(0xffffffffu, softmax.total[n], 2);
        }
        bool rotated = warp == COMPUTE_WARPS - 1;
        multiply_sums(left, one, HALF, lane);
        multiply_sums(left, one, scale_of(largest_left), lane);
        if (!rotated) {
            multiply_sums(right, one, HALF, lane);
            multiply_sums(right, one, scale_of(largest_right), lane);
        }
        if (ranks == 1) {
            float share[N_TILES];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                int head = n * 8 + g;
                share[n] = head < out.num_heads ? share_of(softmax.top[n], softmax.total[n], out.sink[head]) : 0;
            }
            multiply_sums(left, share, 1, lane);
            multiply_sums(right, share, 1, lane);
            auto store = [&](int head, int dim, float first, float second) {
                if (head < out.num_heads) *(u32*)(out.data + token * out.token_stride + head * out.head_stride + dim) = pair_of(first, second);
            };
            put_sums(left, 2 * warp, false, lane, store);
            put_sums(right, 2 * warp + 1, rotated, lane, store);
        } else {
            compute_warps_meet();  // the tiles, whose place the part takes, have been read
            auto keep = [&](int head, int dim, float first, float second) { *(float2*)&s.part.sums[head][dim] = make_float2(first, second); };
            put_sums(left, 2 * warp, false, lane, keep);
            put_sums(right, 2 * warp + 1, rotated, lane, keep);
            if (warp == 0 && t == 0)
#pragma unroll
                for (int n = 0; n < N_TILES; n++) s.part.top[n * 8 + g] = softmax.top[n], s.part.total[n * 8 + g] = softmax.total[n];
        }
    }
}

// The parts of a cluster's CTAs, added up, each CTA a share of the numbers. Loads from other CTAs are slow and are begun
// together.
__device__ inline void combine(Shared& s, const Output& out) {
    u32 ranks = cluster_size(), rank = cluster_rank();
    int token = blockIdx.x / ranks;
    if (threadIdx.x < HEADS) {
        int head = threadIdx.x;
        float top[MAX_RANKS], total[MAX_RANKS], highest = -INFINITY_F, whole = 0;
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++) {
            top[r] = r < ranks ? load_remote(in_rank(address(&s.part.top[head]), r)) : -INFINITY_F;
            total[r] = r < ranks ? load_remote(in_rank(address(&s.part.total[head]), r)) : 0;
        }
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++) highest = fmaxf(highest, top[r]);
        float base = highest == -INFINITY_F ? 0 : highest;
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++) whole += total[r] * power_of_2(top[r] - base);
        float share = head < out.num_heads ? share_of(highest, whole, out.sink[head]) : 0;
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++) s.part.factor[r][head] = power_of_2(top[r] - base) * share;
    }
    __syncthreads();
    for (u32 i = rank * THREADS + threadIdx.x; i < HEADS * DIMS / 4; i += ranks * THREADS) {
        u32 head = i / (DIMS / 4), dim = i % (DIMS / 4) * 4;
        float4 loaded[MAX_RANKS], sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++)
            if (r < ranks) loaded[r] = load_remote_4(in_rank(address(&s.part.sums[head][dim]), r));
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++)
            if (r < ranks) {
                float f = s.part.factor[r][head];
                sum.x += loaded[r].x * f, sum.y += loaded[r].y * f, sum.z += loaded[r].z * f, sum.w += loaded[r].w * f;
            }
        if (head < out.num_heads) *(uint2*)(out.data + token * out.token_stride + head * out.head_stride + dim) = make_uint2(pair_of(sum.x, sum.y), pair_of(sum.z, sum.w));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
few_heads(const u16* q, i64 q_token, i64 q_head, u16* out, i64 out_token, i64 out_head, const float* sink, float scale,
          int num_tokens, int num_heads, const u8* window, i64 window_stride, u32 window_page_size, u32 window_rows,
          const int* window_indices, const int* window_lengths, int window_width, const u8* compressed, i64 compressed_stride,
          u32 compressed_page_size, u32 compressed_rows, const int* compressed_indices, const int* compressed_lengths,
          int compressed_width) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& s = *(Shared*)memory;
    Cache first = {window, window_stride, window_page_size, window_rows, window_indices, window_lengths, window_width};
    Cache second = {compressed, compressed_stride, compressed_page_size, compressed_rows, compressed_indices, compressed_lengths, compressed_width};
    Output output = {out, out_token, out_head, sink, num_heads};
    // The same in all lanes, which the compiler must know, or it guards matrix instructions by branches.
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 33);  // each lane that fetches, and the number of bytes
            barrier_init(&s.empty[i], COMPUTE_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == COMPUTE_WARPS) fetch(s, first, second, num_tokens, lane);
    else compute(s, first, second, q, q_token, q_head, output, scale * LOG2_E * HALF, num_tokens, warp, lane);
    if (cluster_size() > 1) {
        cluster_meet();
        combine(s, output);
        cluster_meet();  // no CTA's memory goes while another reads it
    }
}
