// Activations in 8 bits: what products with quantized weights read. Rows of k bytes, and for each 32 of them a scale and two sums.
#pragma once
#include "common.cuh"

struct Scale { float d; int16_t sum[2]; };                  // of 32 values; sums of the bytes of both halves
struct Activations { const char * q; const Scale * scale; };

// The largest magnitude of a warp's values, as all lanes get it: NaN if one of them is.
__device__ __forceinline__ float warp_top(float x) {
    int bits = __float_as_int(fabsf(x));                                  // as integers NaN is above all
    for (int m = 16; m > 0; m /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, m));
    return __int_as_float(bits);
}
// As stored in Q8_0, so that close calls fall as llama.cpp's do; as it is where f16 has no normal number for it.
__device__ __forceinline__ float as_half(float d) {
    return d < 6.103515625e-5f || d > 65504.0f ? d : half_to_float(float_to_half(d));
}
// 32 values of a warp's lanes, one each, to bytes. All lanes must take part. NaN and infinity make the scale one, next to nothing is zero.
__device__ __forceinline__ void quantize32(float x, char * q, Scale * scale) {
    const int lane = threadIdx.x % 32;
    const float top = warp_top(x), step = top > 1e-36f && top < INFINITY ? 127.0f / top : 0.0f;
    const int v = step > 0.0f ? (int) rintf(x * step) : 0;
    int sum = v;
    for (int m = 8; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    q[lane] = (char) v;
    if (lane == 0) scale->d = as_half(top * (1.0f / 127.0f));
    if (lane % 16 == 0) scale->sum[lane / 16] = (int16_t) sum;
}
