// What the kernels of products share: copies, loads, and weights as bf16.

#include "common.cuh"

#define ALL 0xffffffffu
#define COPY (32 * 16)  // bytes that the lanes of a warp copy by one instruction
#define PARTS_AT_ONCE 4

// A row is read to its end, so the memory may be asked for more of it.
__device__ inline void copy_weights(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline uint4 load_shared_4(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

__device__ inline float4 load_remote_4(u32 from) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
}

// Weights as bf16

// Two e4m3 bytes of a word over 2^120: each widened to 16 bits with its sign, then moved to where the fields of a bf16 are.
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
