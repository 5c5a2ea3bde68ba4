// What the kernels over the 584-byte record share: caches, barriers, clusters, and the end of a softmax.

#define MAX_RANKS 16
#define INFINITY_F __int_as_float(0x7f800000)
#define LOG2_E 1.4426950408889634f
// A running maximum that is this much too small (a factor of 2^8) is still good enough to divide by.
#define SLACK 8.0f

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Cache {
    const u8* data;
    i64 page_stride;  // bytes
    u32 page_size;    // rows
    u32 rows;         // of the whole cache
    const int* indices;  // [T, width], -1 = none
    const int* lengths;  // [T]: no index past it is looked at
    int width;
};

// By value, since a reference to one of two would put both into memory.
__device__ inline Cache one_of(bool first, const Cache& a, const Cache& b) {
    return {first ? a.data : b.data, first ? a.page_stride : b.page_stride, first ? a.page_size : b.page_size, first ? a.rows : b.rows,
            first ? a.indices : b.indices, first ? a.lengths : b.lengths, first ? a.width : b.width};
}

// Into L2. It reads nothing that a launch ahead may still write, since that is written to L2 as well.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// A token's lengths, and the lines of indices that it may have: each of two warps those of a cache.
__device__ inline void prefetch_indices(const Cache& window, const Cache& compressed, int token, int num_tokens, int warp, int lane) {
    if (warp > 1 || token >= num_tokens) return;
    Cache cache = one_of(warp == 0, window, compressed);
    const int* indices = cache.indices + (i64)token * cache.width;
    if (lane == 0 && cache.width) prefetch(cache.lengths + token);
#pragma unroll 1
    for (int i = lane * 32; i < cache.width; i += 32 * 32) prefetch(indices + i);
}

__device__ inline u32 address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// A launch that begins early must wait before it touches what a launch ahead of it writes or reads. The next one may begin
// when all CTAs have let it.
__device__ inline void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ inline void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}

__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for so many more bytes of bulk copies.
__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

// Small copies of a thread, in groups that end one after another. Of a copy the first `bytes` are read, the others are 0.
__device__ inline void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrives when the small copies that this thread has begun are done.
__device__ inline void barrier_arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address(barrier)), "r"(parity) : "memory");
}

// Of a thread of a warp group, all of which come here.
template <int N>
__device__ inline void set_registers(bool more) {
    if (more) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ inline u32 pair_of(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float low_of(u32 pair) { return __int_as_float(pair << 16); }
__device__ inline float high_of(u32 pair) { return __int_as_float(pair & 0xffff0000u); }

__device__ inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Without saying what was stored.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Threads that have ended are not waited for.
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_meet() { cluster_arrive(), cluster_wait(); }

__device__ inline u32 in_rank(u32 shared, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    return remote;
}

__device__ inline float load_remote(u32 from) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(from));
    return v;
}

// Stores 8 bytes in the shared memory of another CTA, whose barrier counts them.
__device__ inline void give_2(u32 to, float a, float b, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(a), "f"(b), "r"(barrier) : "memory");
}

__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 over a head's whole weight, the sink's included; 0 stays 0.
__device__ inline float share_of(float top, float total, float sink) {
    float whole = total + power_of_2(sink * LOG2_E - (top == -INFINITY_F ? 0 : top));
    return whole == 0 ? 0 : reciprocal(whole);
}

struct Output {
    u16* data;
    i64 token_stride, head_stride;
    const float* sink;
    int num_heads;
};
