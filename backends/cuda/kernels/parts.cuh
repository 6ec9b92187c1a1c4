// Several matrices times the same activations, and what is added to the results.
#pragma once
#include "common.cuh"

// One element of a product's result: what may be added to it, then the result.
struct Sum { Tensor dst, bias, residual; };
__device__ __forceinline__ float added(float sum, const Tensor & x, Index k) {
    return x.data ? __fadd_rn(sum, *(const float *) at_repeated(x, k)) : sum;
}
__device__ __forceinline__ void put(const Sum & to, float sum, int row, int column, int i2, int i3) {
    const Index k = {row, column, i2, i3};
    *(float *) at(to.dst, k) = added(added(sum, to.bias, k), to.residual, k);
}

struct Part { Tensor a; Sum to; };
struct Parts { Part part[4]; };                                           // those that are not there have no rows

// Which part block x has rows of, and which of its blocks it is; a block has a row for each warp.
__device__ __forceinline__ int part_of(const Parts & parts, int & block) {
    const int rows = blockDim.x / 32;
    int i = 0, n;
    block = blockIdx.x;
    while (i < 3 && block >= (n = (int) (parts.part[i].a.ne[1] + rows - 1) / rows)) { block -= n; i++; }
    return i;
}
