// Activations in 8 bits: what products with quantized weights read. Rows of k bytes, and for each 32 of them a scale and two sums.
#pragma once
#include "common.cuh"

struct Scale { float d; int16_t sum[2]; };                  // of 32 values; sums of the bytes of both halves
struct Activations { const char * q; const Scale * scale; };

// 32 values of a warp's lanes, one each, to bytes. All lanes must take part.
__device__ __forceinline__ void quantize32(float x, char * q, Scale * scale) {
    const int lane = threadIdx.x % 32;
    const float top = warp_max(fabsf(x)), d = top / 127.0f;
    const int v = top > 0.0f ? (int) rintf(x * (127.0f / top)) : 0;
    int sum = v;
    for (int m = 8; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    q[lane] = (char) v;
    if (lane == 0) scale->d = half_to_float(float_to_half(d));           // as stored in Q8_0: close calls then fall as llama.cpp's do
    if (lane % 16 == 0) scale->sum[lane / 16] = (int16_t) sum;
}
