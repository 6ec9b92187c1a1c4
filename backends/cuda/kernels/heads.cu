// What happens to Q, K and V between their products and the attention, in one go: the heads of Q and K are normed, turned by their
// position and rotated (Hadamard), those of K and V are written to the cells of a cache. Each step is optional. K_TYPE and V_TYPE are the
// types of the cache: a quantized type, or a Plain<number>.
#include "pack.cuh"
#include "rope.cuh"

template <int T> struct Plain { static const int BLOCK = 1, BYTES = T == F32 ? 4 : 2, TYPE = T; };
// normed: by RMS; hadamard: the size of its blocks, 0: none.
struct Heads { int64_t normed; float eps, pad0; int64_t turned, hadamard; float factor, pad1; };

// d floats in shared memory to the head at `to` of a cache row.
template <class T> __device__ __forceinline__ void put_row(char * to, const float * x, int d) {
    if constexpr (T::BLOCK == 1) {
        for (int i = threadIdx.x; i < d; i += blockDim.x) store(T::TYPE, to + i * T::BYTES, x[i]);
    } else {
        for (int i = threadIdx.x; i < d / 32; i += blockDim.x) Pack<T>::pack(x + 32 * i, to + i * T::BYTES);
    }
}
__device__ __forceinline__ void norm_head(float * x, const Tensor & w, int d, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(block_sum(sum) / d + eps);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        const float v = __fmul_rn(x[i], scale);
        x[i] = w.data ? __fmul_rn(v, *(const float *) (w.data + i * w.nb[0])) : v;
    }
}
__device__ __forceinline__ void turn_head(float * x, const Rope & r, const Tensor & pos, const Tensor & factors, int64_t n_tokens, int t, int d) {
    const int n_pairs = (int) (r.mode == VISION ? d / 2 : r.n_dims / 2), start = (int) r.offset;
    for (int p = threadIdx.x; p < n_pairs; p += blockDim.x) {
        const int i = start + (r.mode == NORMAL ? 2 * p : p), j = r.mode == NORMAL ? i + 1 : i + n_pairs;
        float c, s;
        turn(r, pos, factors, n_tokens, t, p, c, s);
        const float a = x[i], b = x[j];
        x[i] = a * c - b * s;
        x[j] = a * s + b * c;
    }
}
__device__ __forceinline__ void rotate_head(float * x, int d, int n, float factor) {
    for (int h = 1; h < n; h *= 2) {
        for (int t = threadIdx.x; t < d / 2; t += blockDim.x) {
            const int i = t / h * 2 * h + t % h;
            const float a = x[i], b = x[i + h];
            x[i] = a + b; x[i + h] = a - b;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < d; i += blockDim.x) x[i] *= factor;
}

// q [d, n_head, n_tokens] -> q_dst; k [d, n_head_kv, n_tokens] and v [dv, ..] -> the rows of k_cells and v_cells that ids name. What is
// not there has no heads. grid: (n_tokens, n_head + 2 n_head_kv); block: a multiple of 32; shared: 4 max(d, dv)
KERNEL __launch_bounds__(256) heads(Tensor q_dst, Tensor q, Tensor q_w, Heads of_q, Tensor k_cells, Tensor k, Tensor k_w, Heads of_k, Tensor v_cells, Tensor v, Heads of_v,
             Tensor ids, Tensor pos, Tensor factors, Rope r) {
    DYNAMIC_SHARED(float, x);
    const int t = blockIdx.x, n_q = q.data ? (int) q.ne[1] : 0, n_k = (int) k.ne[1];
    const bool is_q = (int) blockIdx.y < n_q, is_v = (int) blockIdx.y >= n_q + n_k;
    const int h = blockIdx.y - (is_q ? 0 : is_v ? n_q + n_k : n_q);
    const Tensor & from = is_q ? q : is_v ? v : k;
    const Heads & p = is_q ? of_q : is_v ? of_v : of_k;
    const int d = (int) from.ne[0];
    for (int i = threadIdx.x; i < d; i += blockDim.x) x[i] = *(const float *) at(from, i, h, t, 0);
    __syncthreads();
    if (p.normed) { norm_head(x, is_q ? q_w : k_w, d, p.eps); __syncthreads(); }
    if (p.turned) { turn_head(x, r, pos, factors, from.ne[2], t, d); __syncthreads(); }
    if (p.hadamard) { rotate_head(x, d, (int) p.hadamard, p.factor); __syncthreads(); }
    if (is_q) {
        for (int i = threadIdx.x; i < d; i += blockDim.x) *(float *) at(q_dst, i, h, t, 0) = x[i];
        return;
    }
    const int row = *(const int *) (ids.data + t * ids.nb[0]);
    if (is_v) put_row<V_TYPE>(at(v_cells, 0, row, 0, 0) + h * d / V_TYPE::BLOCK * V_TYPE::BYTES, x, d);
    else put_row<K_TYPE>(at(k_cells, 0, row, 0, 0) + h * d / K_TYPE::BLOCK * K_TYPE::BYTES, x, d);
}
