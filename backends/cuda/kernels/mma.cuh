// Products of small matrices by a warp, on tensor cores. The emulator has twins that follow the documented layout of fragments: of the result
// a lane has rows lane / 4 and that + 8, columns lane % 4 * 2 and that + 1; of A bytes lane % 4 * 4 .. + 3 of those rows, of B those of
// column lane / 4.
#pragma once
#include "common.cuh"

#ifdef GGRAPH_EMULATOR
inline void mma_16(int (&c)[4], int a0, int a1, int b0) {
    const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
    for (int k = 0; k < 4; k++) {
        const int a_0 = __shfl_sync(~0u, a0, row + k), a_1 = __shfl_sync(~0u, a1, row + k);
        const int b_0 = __shfl_sync(~0u, b0, column + k), b_1 = __shfl_sync(~0u, b0, column + 4 + k);
        c[0] = __dp4a(a_0, b_0, c[0]); c[1] = __dp4a(a_0, b_1, c[1]); c[2] = __dp4a(a_1, b_0, c[2]); c[3] = __dp4a(a_1, b_1, c[3]);
    }
}
inline void mma_32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1) { mma_16(c, a0, a1, b0); mma_16(c, a2, a3, b1); }
#else
// 16 x 16 times 16 x 8, signed bytes.
__device__ __forceinline__ void mma_16(int (&c)[4], int a0, int a1, int b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
// 16 x 32 times 32 x 8; a2, a3 and b1 are 16 further along.
__device__ __forceinline__ void mma_32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
