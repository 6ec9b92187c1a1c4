// Moving data of plain types: copies, casts, rows by number, new shapes. One thread per element of the result, blocks of 256.
#include "common.cuh"

#define ELEMENT(dst)                                                             \
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;           \
    if (i >= numel(dst)) return;                                                 \
    const Index o = unravel(dst, i);

// x in the shape and type of dst: both are counted in their own order.
KERNEL copy(Tensor dst, Tensor x, int dst_type, int x_type) {
    ELEMENT(dst)
    store(dst_type, at(dst, o), load(x_type, at(x, unravel(x, i))));
}

// The same for blocks of `bytes` bytes each; shapes count blocks along axis 0.
KERNEL copy_blocks(Tensor dst, Tensor x, int bytes) {
    ELEMENT(dst)
    char * to = at(dst, o); const char * from = at(x, unravel(x, i));
    for (int k = 0; k < bytes; k++) to[k] = from[k];
}

// dst [n, r, b2, b3] = rows [r, b2, b3] of x [n, m, b2, b3]
KERNEL get_rows(Tensor dst, Tensor x, Tensor rows, int x_type) {
    ELEMENT(dst)
    const int row = max(0, *(const int *) at(rows, o.i1, o.i2, o.i3, 0));       // -1 is a token that could not be drawn
    *(float *) at(dst, o) = load(x_type, at(x, o.i0, row, o.i2, o.i3));
}

// Row rows[i] of dst = row i of x. grid: elements of x / 256
KERNEL set_rows(Tensor dst, Tensor x, Tensor rows, int dst_type, int x_type) {
    ELEMENT(x)
    const int row = *(const int *) at(rows, o.i1, o.i2 % (int) rows.ne[1], o.i3 % (int) rows.ne[2], 0);
    store(dst_type, at(dst, o.i0, row, o.i2, o.i3), load(x_type, at(x, o)));
}

KERNEL concat(Tensor dst, Tensor a, Tensor b, int axis, int type) {
    ELEMENT(dst)
    int k[4] = {o.i0, o.i1, o.i2, o.i3};
    const bool second = k[axis] >= (int) a.ne[axis];
    if (second) k[axis] -= (int) a.ne[axis];
    store(type, at(dst, o), load(type, at(second ? b : a, k[0], k[1], k[2], k[3])));
}

KERNEL repeat(Tensor dst, Tensor x, int type) {
    ELEMENT(dst)
    store(type, at(dst, o), load(type, at_repeated(x, o)));
}

KERNEL pad(Tensor dst, Tensor x, int l0, int l1, int l2, int l3) {
    ELEMENT(dst)
    const int a = o.i0 - l0, b = o.i1 - l1, c = o.i2 - l2, d = o.i3 - l3;
    const bool inside = a >= 0 && a < x.ne[0] && b >= 0 && b < x.ne[1] && c >= 0 && c < x.ne[2] && d >= 0 && d < x.ne[3];
    *(float *) at(dst, o) = inside ? *(const float *) at(x, a, b, c, d) : 0.0f;
}

__device__ __forceinline__ int wrapped(int i, int n) { i %= n; return i < 0 ? i + n : i; }
KERNEL roll(Tensor dst, Tensor x, int s0, int s1, int s2, int s3) {
    ELEMENT(dst)
    *(float *) at(dst, o) = *(const float *) at(x, wrapped(o.i0 - s0, (int) x.ne[0]), wrapped(o.i1 - s1, (int) x.ne[1]),
                                                wrapped(o.i2 - s2, (int) x.ne[2]), wrapped(o.i3 - s3, (int) x.ne[3]));
}

// start + step * (element's number): fill has a step of 0
KERNEL arange(Tensor dst, float start, float step) {
    ELEMENT(dst)
    *(float *) at(dst, o) = step == 0.0f ? start : __fadd_rn(start, __fmul_rn((float) i, step));
}

KERNEL diag(Tensor dst, Tensor x) {
    ELEMENT(dst)
    *(float *) at(dst, o) = o.i0 == o.i1 ? *(const float *) at(x, o.i0, 0, o.i2, o.i3) : 0.0f;
}

KERNEL tri(Tensor dst, Tensor x, int lower, int with_diag) {
    ELEMENT(dst)
    const bool keep = (lower ? o.i0 < o.i1 : o.i0 > o.i1) || (with_diag && o.i0 == o.i1);
    *(float *) at(dst, o) = keep ? *(const float *) at(x, o) : 0.0f;
}
