// Up to four quantized matrices times the same 8-bit activations, for few columns; what the graph adds to the results is added here.
// Matrix number i is of TYPE_i, of TYPE_0 if that is not given. A warp has a row.
#include "matvec.cuh"

#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
#ifndef TYPE_3
#define TYPE_3 TYPE_0
#endif
template <class A, class B> struct Same { static const bool yes = false; };
template <class A> struct Same<A, A> { static const bool yes = true; };

// a [k, n, a2, a3], activations of b [k, m, b2, b3], m up to COLUMNS. grid: (sum of the parts' ceil(n / 4), b2, b3); block: 128
template <class T, int COLUMNS> __device__ __forceinline__ void times(const Part & p, int block, const char * q, const Scale * s) {
    const int row = block * (blockDim.x / 32) + threadIdx.x / 32, i2 = blockIdx.y, i3 = blockIdx.z, k = (int) p.a.ne[0], lane = threadIdx.x % 32;
    const Tensor & dst = p.to.dst;
    if (row >= p.a.ne[1]) return;
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    const char * w = at(p.a, 0, row, (int) (i2 * p.a.ne[2] / dst.ne[2]), (int) (i3 * p.a.ne[3] / dst.ne[3]));
    float sum[COLUMNS];
    row_times<T, COLUMNS>(w, q + first * k, s + first * (k / 32), k, (int) dst.ne[1], sum);
    for (int c = 0; c < COLUMNS; c++) if (lane == c && c < dst.ne[1]) put(p.to, sum[c], row, c, i2, i3);
}
template <int COLUMNS> __device__ __forceinline__ void matvec(const Parts & parts, const char * q, const Scale * s) {
    int block;
    const int i = part_of(parts, block);
    if (i == 1 && !Same<TYPE_1, TYPE_0>::yes) times<TYPE_1, COLUMNS>(parts.part[1], block, q, s);
    else if (i == 2 && !Same<TYPE_2, TYPE_0>::yes) times<TYPE_2, COLUMNS>(parts.part[2], block, q, s);
    else if (i == 3 && !Same<TYPE_3, TYPE_0>::yes) times<TYPE_3, COLUMNS>(parts.part[3], block, q, s);
    else times<TYPE_0, COLUMNS>(parts.part[i], block, q, s);
}
KERNEL matvec_1(Parts parts, const char * q, const Scale * s) { matvec<1>(parts, q, s); }
KERNEL matvec_2(Parts parts, const char * q, const Scale * s) { matvec<2>(parts, q, s); }
KERNEL matvec_4(Parts parts, const char * q, const Scale * s) { matvec<4>(parts, q, s); }
KERNEL matvec_8(Parts parts, const char * q, const Scale * s) { matvec<8>(parts, q, s); }
