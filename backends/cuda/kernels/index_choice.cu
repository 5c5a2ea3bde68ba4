// The best rows of each token, and the best blocks of eight, by scores in bf16: sm_90a.
//
// Compiled with KEYS (scores that a CTA can hold), MOST_BLOCKS (that a token may choose) and SHARED_BYTES (what a launch gives)
// defined.
//
// A cluster of CTAs has one token, each CTA a run of its blocks. First the best blocks are chosen by their best score, then the
// best rows among theirs: k blocks or more hold the k best rows, since every better row than the last of these makes its block
// better too. So a row of a million scores is looked at as 131,072, and then as 16,384. Where candidates are given, these are
// the blocks, and the first choice is left out.
//
// A choice is a radix select: the two digits of the k-th best rank, each by a histogram that the CTAs add up, then one ordered
// pass. Equal ranks are taken in the order of their columns, so the result is unique.

#include "common.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define EIGHT 8
#define BINS 256
#define NEWEST 0xffff  // above every score
#define NONE 0x10000   // no rank
#define ALL 0xffffffffu

// Ranks from `least` on are chosen, and of those equal to `level` the first `room`, so many of either being in CTAs before this.
struct Choice {
    u32 least, level, room, before, level_before;
};

// What the histograms of all CTAs say of the `room` best ranks.
struct Found {
    int digit;           // that of the last of them; -1 where there are no more than these
    u32 above;           // ranks of higher digits
    u32 before;          // those of them in CTAs before this one
    u32 level_before;    // and ranks of this digit there
};

struct Shared {
    u16 ranks[KEYS];
    u32 blocks[MOST_BLOCKS];    // chosen in this CTA's run
    u32 counts[2][2][BINS];     // by choice and digit; other CTAs read them
    u32 counted[WARPS];  // chosen in a warp's run: in the low half, and in the high one of the last rank
    Found found;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");
static_assert(KEYS >= MOST_BLOCKS * EIGHT, "the rows of all blocks that may be chosen in one run");

// 16 bits that order as scores do, 0 for NaN. -0 counts as 0.
__device__ inline u32 rank_of(u32 score) {
    if ((score & 0x7fff) > 0x7f80) return 0;
    if (score == 0x8000) score = 0;
    return score & 0x8000 ? score ^ 0xffff : score | 0x8000;
}

__device__ inline uint4 load_remote_16(u32 from) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

// Sum over the lanes before this one.
__device__ inline u32 sum_before(u32 x, int lane, u32& total) {
    u32 sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, by);
        if (lane >= by) sum += other;
    }
    total = __shfl_sync(ALL, sum, 31);
    return sum - x;
}

// By the first warp.
__device__ inline Found find_digit(u32 counts, u32 room, int lane) {
    const int each = BINS / 32, first = (31 - lane) * each;  // lane 0 has the highest digits
    const u32 ranks = cluster_size(), rank = cluster_rank();
    u32 whole[each] = {}, before[each] = {}, sum = 0, sum_before_us = 0;
    for (u32 r = 0; r < ranks; r++) {
        const u32 from = in_rank(counts, r) + first * 4, mask = r < rank ? ~0u : 0;
#pragma unroll
        for (int i = 0; i < each; i += 4) {
            uint4 v = load_remote_16(from + i * 4);
            whole[i] += v.x, whole[i + 1] += v.y, whole[i + 2] += v.z, whole[i + 3] += v.w;
            before[i] += v.x & mask, before[i + 1] += v.y & mask, before[i + 2] += v.z & mask, before[i + 3] += v.w & mask;
        }
    }
#pragma unroll
    for (int i = 0; i < each; i++) sum += whole[i], sum_before_us += before[i];
    u32 total, total_before;
    Found mine = {-1, sum_before(sum, lane, total), sum_before(sum_before_us, lane, total_before), 0};
    if (total <= room) return {-1, total, total_before, 0};
#pragma unroll
    for (int i = each - 1; i >= 0; i--) {
        if (mine.digit >= 0) continue;
        if (mine.above < room && mine.above + whole[i] >= room) mine.digit = first + i, mine.level_before = before[i];
        else mine.above += whole[i], mine.before += before[i];
    }
    const int owner = __ffs(__ballot_sync(ALL, mine.digit >= 0)) - 1;
    return {__shfl_sync(ALL, mine.digit, owner), __shfl_sync(ALL, mine.above, owner), __shfl_sync(ALL, mine.before, owner),
            __shfl_sync(ALL, mine.level_before, owner)};
}

__device__ inline u32 rank_at(const uint4& eight, int i) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    return words[i / 2] >> (16 * (i % 2)) & 0xffff;
}

// What is chosen of the ranks of all CTAs, of which `eights` times EIGHT are in this one, for at most `k`.
__device__ inline Choice choose(Shared& s, int stage, int eights, u32 k) {
    const int thread = threadIdx.x;
    u32 upper = 0, room = k, before = 0;
    for (int turn = 0; turn < 2; turn++) {
        const int shift = turn == 0 ? 8 : 0;
        u32* counts = s.counts[stage][turn];
        for (int i = thread; i < eights; i += THREADS) {
            uint4 v = ((const uint4*)s.ranks)[i];
#pragma unroll
            for (int e = 0; e < EIGHT; e++) {
                u32 rank = rank_at(v, e);
                if (rank && rank >> (shift + 8) == upper) atomicAdd(counts + (rank >> shift & 255), 1);
            }
        }
        cluster_meet();
        if (thread < 32) {
            Found found = find_digit(address(counts), room, thread);
            if (thread == 0) s.found = found;
        }
        __syncthreads();
        const Found found = s.found;
        before += found.before;
        if (found.digit < 0) return {max(upper << (shift + 8), 1u), NONE, 0, before, 0};
        upper = upper << 8 | found.digit, room -= found.above;
        if (turn == 1) return {upper + 1, upper, room, before, found.level_before};
    }
}

// Calls `take(index, place)` for this CTA's ranks that are chosen, in order, `place` being that among all. Returns the first
// and the last place.
template <class Take>
__device__ inline uint2 collect(Shared& s, const Choice& c, int eights, Take take) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Each warp has a run of the ranks, to be counted before it is taken.
    const int each = (eights + WARPS - 1) / WARPS, first = warp * each, last = min(first + each, eights);
    auto bits = [&](int i) {
        u32 found = 0;  // above in the low half, level in the high one
        if (i >= last) return found;
        uint4 v = ((const uint4*)s.ranks)[i];
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            u32 rank = rank_at(v, e);
            found |= (rank >= c.least ? 1u << e : 0) | (rank == c.level ? 1u << (16 + e) : 0);
        }
        return found;
    };
    auto counted = [](u32 found) { return __popc(found & 0xffff) | __popc(found >> 16) << 16; };
    u32 here = 0;
    for (int i = first; i < last; i += 32) here += counted(bits(i + lane));
    here = __reduce_add_sync(ALL, here);
    if (lane == 0) s.counted[warp] = here;
    __syncthreads();
    u32 all;
    here = lane < WARPS ? s.counted[lane] : 0;
    u32 above = __shfl_sync(ALL, sum_before(here & 0xffff, lane, all), warp), all_above = all;
    u32 level = __shfl_sync(ALL, sum_before(here >> 16, lane, all), warp), all_level = all;
    above += c.before, level += c.level_before;

    for (int i = first; i < last; i += 32) {
        const u32 found = bits(i + lane);
        if (!__any_sync(ALL, found)) continue;
        const u32 others = sum_before(counted(found), lane, all);
        u32 above_place = above + (others & 0xffff), level_place = level + (others >> 16);
        for (u32 left = (found | found >> 16) & 0xffff; left; left &= left - 1) {
            const u32 e = __ffs(left) - 1;
            const bool is_above = found >> e & 1;
            if (is_above || level_place < c.room) take((i + lane) * EIGHT + e, above_place + min(level_place, c.room));
            if (is_above) above_place++;
            else level_place++;
        }
        above += all & 0xffff, level += all >> 16;
    }
    return {c.before + min(c.level_before, c.room), c.before + all_above + min(c.level_before + all_level, c.room)};
}

// A block's eight scores or best scores as ranks: `rank(i, score)` of each.
template <class Rank>
__device__ inline uint4 ranked(uint4 v, Rank rank) {
    u32 x[4];
#pragma unroll
    for (int w = 0; w < 4; w++) x[w] = rank(2 * w, rank_at(v, 2 * w)) | rank(2 * w + 1, rank_at(v, 2 * w + 1)) << 16;
    return {x[0], x[1], x[2], x[3]};
}

// scores and best [T, columns] and [T, columns / EIGHT], rows 16-byte aligned; num_visible [T]; all_candidates [T, columns /
// EIGHT], the blocks that the columns stand for, -1 = none, or null, and then best is not looked at. out_rows [T, num_rows],
// ascending, -1 where there are fewer; out_blocks [T, num_blocks] likewise, the newest always among them, or null where nobody
// asks for them: then num_blocks of them are only looked into.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
index_choice(const u16* scores, i64 scores_stride, const u16* best, i64 best_stride, int num_columns, const i64* num_visible,
             const i64* all_candidates, i64 candidates_stride, i64* out_rows, int num_rows, i64* out_blocks, int num_blocks) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *(Shared*)memory;
    const u32 ranks = cluster_size(), rank = cluster_rank();
    const int token = blockIdx.x / ranks, thread = threadIdx.x;
    for (int i = thread; i < 4 * BINS; i += THREADS) s.counts[0][0][i] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const bool whole = all_candidates == nullptr;
    const i64 visible = max(num_visible[token], (i64)0);
    const int seen = whole ? (int)min(visible, (i64)num_columns) : visible ? num_columns : 0;
    const int blocks = (seen + EIGHT - 1) / EIGHT;
    // Runs begin at a multiple of 16 bytes of best scores.
    const int each = ((blocks + ranks - 1) / ranks + EIGHT - 1) / EIGHT * EIGHT;
    const int first = min((int)rank * each, blocks), count = min(each, blocks - first);
    const i64* candidates = whole ? nullptr : all_candidates + token * candidates_stride;
    const bool publishes = out_blocks != nullptr;

    u32 begin = 0, chosen = count;  // of this CTA's blocks
    auto block_at = [&](u32 i) { return first + (int)(whole ? s.blocks[(begin + i) % MOST_BLOCKS] : i); };
    for (int stage = whole ? 0 : 1; stage < 2; stage++) {
        const int eights = stage == 0 ? (count + EIGHT - 1) / EIGHT : chosen;
        for (int i = thread; i < eights; i += THREADS) {
            uint4 v;
            if (stage == 0) {
                const int from = first + i * EIGHT;
                v = ranked(*(const uint4*)(best + token * best_stride + from), [&](int e, u32 score) {
                    if (from + e == blocks - 1 && publishes) return (u32)NEWEST;
                    return from + e < first + count ? max(rank_of(score), 1u) : 0;  // one of no number comes after all others
                });
            } else {
                const int block = block_at(i);
                const i64 position = (whole ? block : candidates[block]) * (i64)EIGHT;
                v = ranked(*(const uint4*)(scores + token * scores_stride + (i64)block * EIGHT), [&](int e, u32 score) {
                    return position >= 0 && position + e < visible && block * EIGHT + e < seen ? rank_of(score) : 0;
                });
            }
            ((uint4*)s.ranks)[i] = v;
        }
        __syncthreads();
        const int size = stage == 0 ? num_blocks : num_rows;
        i64* to = stage == 0 ? publishes ? out_blocks + (i64)token * size : nullptr : out_rows + (i64)token * size;
        const Choice choice = choose(s, stage, eights, size);
        const uint2 places = collect(s, choice, eights, [&](u32 index, u32 place) {
            if (stage == 0) {
                s.blocks[place % MOST_BLOCKS] = index;  // where they begin is known when all are counted
                if (publishes) to[place] = first + index;
            } else {
                const int block = block_at(index / EIGHT);
                to[place] = (whole ? block : candidates[block]) * (i64)EIGHT + index % EIGHT;
            }
        });
        // The last CTA knows how many there are, and puts -1 behind them.
        if (to != nullptr && rank == ranks - 1)
            for (int i = places.y + thread; i < size; i += THREADS) to[i] = -1;
        if (stage == 0) begin = places.x, chosen = places.y - places.x;
        __syncthreads();
    }
    cluster_meet();  // others may still read the counts
}
