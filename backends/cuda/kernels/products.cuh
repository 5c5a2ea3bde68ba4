// What the kernels of products share: copies and loads, and weights as bf16.

#include "common.cuh"
#include "e4m3.cuh"

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
