// What translated kernels are made of: the values of PTX instructions, checked memory, and what threads wait for.
//
// Registers are unsigned integers of their width, whatever they hold. Floats are converted where they are used, and every
// result is rounded as its instruction says.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <csetjmp>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

// What a register holds before anything is written to it: NaN as fp32, and in the halves as bf16 and f16.
static const u64 UNSET = 0xfff7fff7fff7fff7ull;

struct Warp;
struct Cta;

struct Thread {
    Cta* cta;
    Warp* warp;
    u32 tid, lane, ctaid[3], nctaid[3], block[3], ntid, cluster_rank, cluster_size;
    u32 shared_first, shared_bytes;  // the first address of this CTA's shared memory, and its size
    u8* shared;                      // what lies there
    u64* written;                    // of each 16 bytes of it: when a thread stored there last, and which
    u64* clock;                      // goes on at every fence between threads' stores and asynchronous reads
    const u64* parameters;
    bool waited;  // for the launch ahead
};

[[noreturn]] void fail(const Thread& t, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Numbers

template <class To, class From>
static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline float fp32(u32 x) { return bits_as<float>(x); }
static inline u32 fp32_bits(float x) { return x != x ? 0x7fffffffu : bits_as<u32>(x); }
static inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

static inline float bf16(u16 x) { return fp32((u32)x << 16); }

// To the nearest, ties to even. `x` may have more bits than fp32.
static inline u16 bf16_bits(double x) {
    if (x != x) return 0x7fff;
    if (std::fabs(x) < 0x1p-126) {
        double steps = std::nearbyint(std::fabs(x) * 0x1p133);
        return (u16)((std::signbit(x) ? 0x8000 : 0) | (u16)steps);
    }
    u64 all = bits_as<u64>(x);
    u64 kept = all >> 45, rest = all & ((1ull << 45) - 1), half = 1ull << 44;
    kept += rest > half || (rest == half && (kept & 1));  // 7 bits of it are the fraction
    u64 exponent = (kept >> 7) & 0x7ff;
    u16 sign = std::signbit(x) ? 0x8000 : 0;
    if (exponent >= 1023 + 128) return sign | 0x7f80;
    return (u16)(sign | (exponent - 1023 + 127) << 7 | (kept & 0x7f));
}

static inline float f16(u16 x) {
    u32 sign = (u32)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 31) return fp32(fraction ? 0x7fffffffu : sign | 0x7f800000u);
    float size = exponent ? std::ldexp(1.0f + (float)fraction / 1024, (int)exponent - 15) : std::ldexp((float)fraction, -24);
    return sign ? -size : size;
}

static inline u16 f16_bits(double x) {
    if (x != x) return 0x7fff;
    u16 sign = std::signbit(x) ? 0x8000 : 0;
    double size = std::fabs(x);
    if (size < 0x1p-14) return (u16)(sign | (u16)std::nearbyint(size * 0x1p24));
    if (size >= 65520) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);  // size = 0.5 to 1 times 2^exponent
    u32 steps = (u32)std::nearbyint(std::ldexp(size, 11 - exponent));  // 1024 to 2048
    return (u16)(sign | (((u32)(exponent + 14) << 10) + (steps - 1024)));
}

static inline u16 f16_of_e4m3(u8 x) {
    u16 sign = (u16)(x & 0x80) << 8;
    u32 exponent = x >> 3 & 15, fraction = x & 7;
    if ((x & 0x7f) == 0x7f) return 0x7fff;
    double size = exponent ? std::ldexp(8.0 + fraction, (int)exponent - 10) : std::ldexp((double)fraction, -9);
    return sign | f16_bits(size);
}

static inline u32 pair(u16 low, u16 high) { return low | (u32)high << 16; }
static inline float relu(float x) { return x <= 0 ? 0 : x; }  // NaN stays

static inline u32 add_f32(u32 a, u32 b) { return fp32_bits(fp32(a) + fp32(b)); }
static inline u32 sub_f32(u32 a, u32 b) { return fp32_bits(fp32(a) - fp32(b)); }
static inline u32 mul_f32(u32 a, u32 b) { return fp32_bits(fp32(a) * fp32(b)); }
static inline u32 div_f32(u32 a, u32 b) { return fp32_bits(fp32(a) / fp32(b)); }
static inline u32 sqrt_f32(u32 a) { return fp32_bits(std::sqrt(fp32(a))); }
static inline u32 fma_f32(u32 a, u32 b, u32 c) { return fp32_bits(std::fma(fp32(a), fp32(b), fp32(c))); }
static inline u32 abs_f32(u32 a) { return a & 0x7fffffffu; }
static inline u32 neg_f32(u32 a) { return a ^ 0x80000000u; }
// The one that is a number; +0 is more than -0.
static inline u32 max_f32(u32 a, u32 b) {
    float x = fp32(a), y = fp32(b);
    if (x != x) return fp32_bits(y);
    if (y != y) return a;
    return x == y ? a & b : x > y ? a : b;
}
static inline u32 min_f32(u32 a, u32 b) {
    float x = fp32(a), y = fp32(b);
    if (x != x) return fp32_bits(y);
    if (y != y) return a;
    return x == y ? a | b : x < y ? a : b;
}
static inline u32 ex2_ftz(u32 a) { return fp32_bits(flushed((float)std::exp2((double)flushed(fp32(a))))); }
static inline u32 rcp_ftz(u32 a) { return fp32_bits(flushed(1.0f / flushed(fp32(a)))); }

static inline u32 bf16x2_of_f32(u32 high, u32 low) { return pair(bf16_bits(fp32(low)), bf16_bits(fp32(high))); }
static inline u32 bf16x2_relu_of_f32(u32 high, u32 low) { return pair(bf16_bits(relu(fp32(low))), bf16_bits(relu(fp32(high)))); }
static inline u32 f16x2_of_f32(u32 high, u32 low) { return pair(f16_bits(fp32(low)), f16_bits(fp32(high))); }
static inline u32 f16x2_of_e4m3x2(u16 x) { return pair(f16_of_e4m3((u8)x), f16_of_e4m3((u8)(x >> 8))); }
// Products of two such numbers are exact in double.
static inline u16 mul_bf16(u16 a, u16 b) { return bf16_bits((double)bf16(a) * bf16(b)); }
static inline u16 mul_f16(u16 a, u16 b) { return f16_bits((double)f16(a) * f16(b)); }
static inline u32 mul_bf16x2(u32 a, u32 b) { return pair(mul_bf16((u16)a, (u16)b), mul_bf16((u16)(a >> 16), (u16)(b >> 16))); }
static inline u32 mul_f16x2(u32 a, u32 b) { return pair(mul_f16((u16)a, (u16)b), mul_f16((u16)(a >> 16), (u16)(b >> 16))); }

// Bits

template <class U>
static inline U shl(U x, u32 by) { return by < 8 * sizeof(U) ? (U)(x << by) : 0; }
template <class T>
static inline T shr(T x, u32 by) { return by < 8 * sizeof(T) ? (T)(x >> by) : (T)(x < 0 ? -1 : 0); }

static inline u32 wrap(u32 by) { return by & 31; }
static inline u32 clamp(u32 by) { return by < 32 ? by : 32; }
static inline u32 shf_l(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> (32 - by)); }
static inline u32 shf_r(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> by); }

static inline u32 brev(u32 x) {
    u32 r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
static inline u32 clz(u32 x) { return x ? (u32)__builtin_clz(x) : 32; }
static inline u32 bfind(u32 x) { return x ? 31 - clz(x) : ~0u; }
static inline u32 bfind_shift(u32 x) { return x ? clz(x) : ~0u; }
static inline u32 bfi(u32 a, u32 b, u32 at, u32 length) {
    at &= 255, length &= 255;
    if (at > 31 || !length) return b;
    u32 mask = (length > 31 ? ~0u : (1u << length) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}
static inline u32 bfe_u32(u32 a, u32 at, u32 length) {
    at &= 255, length &= 255;
    return at > 31 ? 0 : a >> at & (length > 31 ? ~0u : (1u << length) - 1);
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 r = 0;
    for (u32 i = 0; i < 8; i++)
        if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
}
static inline u32 prmt(u32 a, u32 b, u32 select) {
    u64 bytes = a | (u64)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 which = select >> (4 * i) & 15;
        u8 byte = (u8)(bytes >> (8 * (which & 7)));
        if (which & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= (u32)byte << (8 * i);
    }
    return r;
}

template <class T>
static inline T divide(const Thread& t, T a, T b, int line) {
    if (b == 0) fail(t, line, "division of %lld by 0", (long long)a);
    return b == (T)-1 && (T)-1 < 0 ? (T)(0 - a) : (T)(a / b);
}
template <class T>
static inline T remainder_of(const Thread& t, T a, T b, int line) {
    if (b == 0) fail(t, line, "remainder of %lld by 0", (long long)a);
    return b == (T)-1 && (T)-1 < 0 ? 0 : (T)(a % b);
}

// Memory

[[noreturn]] void bad_shared(const Thread& t, u32 at, u32 bytes, int line);
u8* cluster_shared_at(const Thread& t, u32 at, u32 bytes, int line);  // in any CTA of the cluster
u8* global_at(const Thread& t, u64 at, u32 bytes, int line);

static inline u8* shared_at(const Thread& t, u32 at, u32 bytes, int line) {
    u32 offset = at - t.shared_first;
    if (offset >= t.shared_bytes || bytes > t.shared_bytes - offset || at & (bytes - 1)) bad_shared(t, at, bytes, line);
    return t.shared + offset;
}

// For a store, which asynchronous reads do not see before a fence.
static inline u8* stored_at(const Thread& t, u32 at, u32 bytes, int line) {
    u8* to = shared_at(t, at, bytes, line);
    t.written[(at - t.shared_first) / 16] = *t.clock << 16 | t.tid;
    return to;
}

template <class T, int N = 1>
struct Numbers {
    T x[N];
};
template <class T, int N>
static inline Numbers<T, N> load(const u8* from) {
    Numbers<T, N> v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class T, int N>
static inline void store(u8* to, Numbers<T, N> v) { memcpy(to, &v, sizeof v); }

u32 remote_address(const Thread& t, u32 at, u32 rank, int line);  // mapa

// Of the value that was there; threads take turns only where they wait.
template <class T, class Change>
static inline T exchange(u8* at, Change change) {
    T old;
    memcpy(&old, at, sizeof old);
    T next = change(old);
    memcpy(at, &next, sizeof next);
    return old;
}

// Asynchronous copies

void copy_small(Thread& t, u32 to, u64 from, u32 bytes, u32 live_bytes, int line);  // cp.async
void copies_commit(Thread& t);
void copies_wait(Thread& t, u32 pending);
void copies_wait_all(Thread& t);
void copies_arrive(Thread& t, u32 barrier, int line);                                   // cp.async.mbarrier.arrive.noinc
void copy_bulk(Thread& t, u32 to, u64 from, u32 bytes, u32 barrier, int line);          // cp.async.bulk from global memory
void store_async(Thread& t, u32 to, const void* data, u32 bytes, u32 barrier, int line);  // st.async
void fence_async(Thread& t);                                                            // fence.proxy.async

// Barriers

void barrier_init(Thread& t, u32 at, u32 count, int line);
void barrier_invalidate(Thread& t, u32 at, int line);
void barrier_arrive(Thread& t, u32 at, u32 count, int line);
void barrier_expect(Thread& t, u32 at, u32 bytes, int line);
void barrier_arrive_remote(Thread& t, u32 at, u32 count, int line);
bool barrier_try_wait(Thread& t, u32 at, u32 parity, int line);

void cta_meet(Thread& t, u32 which, u32 threads, int line);  // 0 threads: all of the CTA
void cta_arrive(Thread& t, u32 which, u32 threads, int line);
enum Reduction { ANY, EVERY, COUNT };
u32 cta_reduce(Thread& t, Reduction how, u32 which, u32 threads, bool value, int line);
void cluster_arrive(Thread& t, int line);
void cluster_wait(Thread& t, int line);
// Of an instruction that all threads of a warp execute together.
void aligned(Thread& t, int line);

// What the threads of a warp do together

void warp_meet(Thread& t, u32 mask, int line);
enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };
u32 shuffle(Thread& t, Shuffle how, u32 x, u32 lane, u32 limits, u32 mask, bool& inside, int line);
u32 ballot(Thread& t, bool value, u32 mask, int line);
bool vote_any(Thread& t, bool value, u32 mask, int line);
bool vote_all(Thread& t, bool value, u32 mask, int line);
enum Reduce { ADD, MIN_U32, MAX_U32, MIN_S32, MAX_S32, AND, OR, XOR };
u32 reduce(Thread& t, Reduce how, u32 x, u32 mask, int line);

void load_matrices(Thread& t, u32* to, u32 count, bool transposed, u32 from, int line);           // ldmatrix
void store_matrices(Thread& t, const u32* from, u32 count, bool transposed, u32 to, int line);  // stmatrix
u32 transpose_matrix(Thread& t, u32 x, int line);                                               // movmatrix
enum Half { F16, BF16 };
void multiply(Thread& t, Half kind, u32* sums, const u32* a, const u32* b, int line);  // m16n8k16

// wgmma m64nNk16: `sums` are the registers themselves, which are written when the product is done. A comes from
// registers (`a`) or by a descriptor.
void multiply_async(Thread& t, Half kind, u32 columns, u32* const* sums, const u32* a, u64 a_at, u64 b_at, bool add, int a_sign,
                    int b_sign, bool a_turned, bool b_turned, int line);
void matrices_fence(Thread& t, int line);
void matrices_commit(Thread& t, int line);
void matrices_wait(Thread& t, u32 pending, int line);

// Written by the translation

void kernel(Thread& t);
