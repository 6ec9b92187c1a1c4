// Rotary positions. One block of 64 threads for each head of each token.
#include "rope.cuh"

// x [head, n_head, n_tokens, ..]. grid: (n_tokens, n_head, axis 3)
KERNEL rope(Tensor dst, Tensor x, Tensor pos, Tensor factors, Rope r) {
    const int t = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int head = (int) x.ne[0], n_pairs = (int) (r.mode == VISION ? head / 2 : r.n_dims / 2), start = (int) r.offset;
    const char * from = at(x, 0, h, t, b); char * to = at(dst, 0, h, t, b);
    for (int p = threadIdx.x; p < n_pairs; p += blockDim.x) {
        const int i = start + (r.mode == NORMAL ? 2 * p : p), j = r.mode == NORMAL ? i + 1 : i + n_pairs;
        float c, s;
        turn(r, pos, factors, x.ne[2], t, p, c, s);
        const float a = *(const float *) (from + i * x.nb[0]), d = *(const float *) (from + j * x.nb[0]);
        *(float *) (to + i * dst.nb[0]) = a * c - d * s;
        *(float *) (to + j * dst.nb[0]) = a * s + d * c;
    }
    for (int k = threadIdx.x; k < head - 2 * n_pairs; k += blockDim.x) {                    // what is not turned
        const int i = k < start ? k : k + 2 * n_pairs;
        *(float *) (to + i * dst.nb[0]) = *(const float *) (from + i * x.nb[0]);
    }
}
