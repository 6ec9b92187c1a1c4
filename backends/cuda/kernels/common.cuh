// What all kernels stand on: tensors as arguments, 16-bit floats without headers, sums over warps and blocks.
// A kernel file is compiled by NVRTC for a GPU, or by a C++ compiler for the emulator; it includes nothing but files of this folder.
#pragma once
#ifdef GGRAPH_EMULATOR
#include "emulator.cuh"
#else
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long uint64_t;
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) char dynamic_shared_memory[]; type * name = (type *) dynamic_shared_memory
#define DEVICE_TABLE __device__ const
#define INFINITY __int_as_float(0x7f800000)
__device__ __forceinline__ float half_to_float(uint16_t h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ uint16_t float_to_half(float f) { uint16_t h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
#endif
#define KERNEL extern "C" __global__ void

// A tensor: its first byte, its shape and its byte strides, the contiguous axis first.
struct Tensor { char * data; int64_t ne[4], nb[4]; };

enum Type { F32 = 0, F16 = 1, I8 = 24, I16 = 25, I32 = 26, I64 = 27, BF16 = 30 };       // ids of plain types, as in GGUF

__device__ __forceinline__ float bf16_to_float(uint16_t h) { return __int_as_float((int) h << 16); }
__device__ __forceinline__ uint16_t float_to_bf16(float f) {
    const uint32_t u = (uint32_t) __float_as_int(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t) (u >> 16 | 64);
    return (uint16_t) ((u + (0x7fffu + (u >> 16 & 1))) >> 16);
}

// One element of a plain type, as float and back. The type is the same for all threads: the branch costs next to nothing.
__device__ __forceinline__ float load(int type, const char * p) {
    switch (type) {
        case F32: return *(const float *) p;
        case F16: return half_to_float(*(const uint16_t *) p);
        case BF16: return bf16_to_float(*(const uint16_t *) p);
        case I32: return (float) *(const int *) p;
        case I16: return (float) *(const int16_t *) p;
        default: return (float) *(const int8_t *) p;
    }
}
__device__ __forceinline__ void store(int type, char * p, float x) {
    switch (type) {
        case F32: *(float *) p = x; break;
        case F16: *(uint16_t *) p = float_to_half(x); break;
        case BF16: *(uint16_t *) p = float_to_bf16(x); break;
        case I32: *(int *) p = (int) x; break;
        case I16: *(int16_t *) p = (int16_t) x; break;
        default: *(int8_t *) p = (int8_t) x;
    }
}

struct Index { int i0, i1, i2, i3; };

// Element i of a tensor counted in its own order (axis 0 fastest).
__device__ __forceinline__ Index unravel(const Tensor & t, int64_t i) {
    Index x;
    if (i < 0x7fffffff) {                                     // nearly always; 32-bit divisions are many times cheaper
        uint32_t r = (uint32_t) i, n0 = (uint32_t) t.ne[0], n1 = (uint32_t) t.ne[1], n2 = (uint32_t) t.ne[2];
        x.i0 = r % n0; r /= n0; x.i1 = r % n1; r /= n1; x.i2 = r % n2; x.i3 = r / n2;
    } else {
        x.i0 = (int) (i % t.ne[0]); i /= t.ne[0]; x.i1 = (int) (i % t.ne[1]); i /= t.ne[1]; x.i2 = (int) (i % t.ne[2]); x.i3 = (int) (i / t.ne[2]);
    }
    return x;
}
__device__ __forceinline__ int64_t numel(const Tensor & t) { return t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]; }
__device__ __forceinline__ char * at(const Tensor & t, int i0, int i1, int i2, int i3) {
    return t.data + i0 * t.nb[0] + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
}
__device__ __forceinline__ char * at(const Tensor & t, Index x) { return at(t, x.i0, x.i1, x.i2, x.i3); }
// The same where the tensor repeats along its axes as often as need be.
__device__ __forceinline__ char * at_repeated(const Tensor & t, Index x) {
    return at(t, x.i0 % (int) t.ne[0], x.i1 % (int) t.ne[1], x.i2 % (int) t.ne[2], x.i3 % (int) t.ne[3]);
}
// Row r counted through a tensor, as indices (i0 is 0).
__device__ __forceinline__ Index row_index(const Tensor & t, int64_t r) {
    Index x;
    x.i0 = 0; x.i1 = (int) (r % t.ne[1]); r /= t.ne[1]; x.i2 = (int) (r % t.ne[2]); x.i3 = (int) (r / t.ne[2]);
    return x;
}

// Sums and maxima. A warp's lanes all get the result, always added in the same order.
__device__ __forceinline__ float warp_sum(float x) {
    for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
    return x;
}
// Over a block of whole warps; every thread gets the result.
template <bool MAX> __device__ __forceinline__ float block_reduce(float x) {
    __shared__ float partial[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = MAX ? warp_max(x) : warp_sum(x);
    if (n_warps == 1) return x;
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = lane < n_warps ? partial[lane] : MAX ? -INFINITY : 0.0f;
    return MAX ? warp_max(x) : warp_sum(x);
}
__device__ __forceinline__ float block_sum(float x) { return block_reduce<false>(x); }
__device__ __forceinline__ float block_max(float x) { return block_reduce<true>(x); }
