// e4m3 codes as bf16, times powers of two. What is exact in bf16 stays so.

// Two e4m3 bytes of a word as two bf16, over 2^120: each widened to 16 bits with its sign, then moved to where the fields
// of a bf16 are.
__device__ inline u32 widened(u32 word, bool upper) {
    u32 wide;
    if (upper) asm("prmt.b32 %0, %1, 0, 0xb3a2;" : "=r"(wide) : "r"(word));
    else asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(wide) : "r"(word));
    return (wide << 4) & 0x87f087f0u;
}

__device__ inline u32 scaled(u32 pair, u32 by) {
    u32 product;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
    return product;
}

// 2^(byte - 7), which puts the 2^120 back, and the rest where that is no bf16: both twice.
#define MOST_AT_ONCE 134
__device__ inline u32 scale_pair(u32 byte) { return (min(byte, MOST_AT_ONCE) + 120) * 0x00800080u; }
__device__ inline u32 rest_pair(u32 byte) { return (max(byte, MOST_AT_ONCE) - MOST_AT_ONCE + 127) * 0x00800080u; }
