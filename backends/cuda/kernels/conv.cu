// Causal convolution over time of each channel.
#include "glu.cuh"
#include "state.cuh"

// x [d_conv - 1 + n_tokens, d_inner, n_seqs], kernel [d_conv, d_inner] -> [d_inner, n_tokens, n_seqs]. grid: elements / 256
KERNEL ssm_conv(Tensor dst, Tensor x, Tensor kernel) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index o = unravel(dst, i);
    float sum = 0.0f;
    for (int k = 0; k < kernel.ne[0]; k++) sum += f32(at(x, o.i1 + k, o.i0, o.i2, 0)) * f32(at(kernel, k, o.i0, 0, 0));
    *(float *) at(dst, o) = sum;
}

// The same going on from a state row, where the last inputs are left as well. x [channels, n_tokens, n_seqs], kernel [d_conv, channels];
// cells [(d_conv - 1) channels, rows] hold the inputs before, of row from[seq], and get those before the end in row to[seq, n]: n counts
// snapshots, each a token earlier. A thread has a channel and up to CHUNK tokens. grid: (channels / 128, n_tokens / CHUNK, n_seqs)
const int CHUNK = 32, MAX_TAPS = 8;

KERNEL conv_going_on(Tensor dst, Tensor x, Tensor kernel, Tensor bias, Tensor cells, Tensor from, Tensor new_cells, Tensor to, int with_silu) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, seq = blockIdx.z, n_tokens = (int) x.ne[1], n = (int) kernel.ne[0] - 1;
    if (c >= x.ne[0]) return;
    const int t0 = blockIdx.y * CHUNK, t1 = min(t0 + CHUNK, n_tokens);
    const float * before = (const float *) at(cells, 0, *(const int *) at(from, seq, 0, 0, 0), 0, 0) + (int64_t) c * n;
    float taps[MAX_TAPS], window[MAX_TAPS];
    for (int k = 0; k <= n; k++) taps[k] = f32(at(kernel, k, c, 0, 0));
    const float plus = bias.data ? f32(bias.data + c * bias.nb[0]) : 0.0f;
    for (int k = 0; k < n; k++) { const int t = t0 - n + k; window[k] = t < 0 ? before[n + t] : f32(at(x, c, t, seq, 0)); }
    for (int t = t0; t < t1; t++) {
        window[n] = f32(at(x, c, t, seq, 0));
        float sum = 0.0f;
        for (int k = 0; k <= n; k++) sum += window[k] * taps[k];
        if (bias.data) sum = __fadd_rn(sum, plus);
        *(float *) at(dst, c, t, seq, 0) = with_silu ? silu(sum) : sum;
        for (int k = 0; k < n; k++) window[k] = window[k + 1];
    }
    if (t1 < n_tokens) return;                                            // the last chunk keeps what the next run goes on from
    for (int i = 0; i < to.ne[1]; i++) {
        float * after = (float *) at(new_cells, 0, *(const int *) at(to, seq, i, 0, 0), 0, 0) + (int64_t) c * n;
        for (int k = 0; k < n; k++) {
            const int t = n_tokens - i - n + k;
            after[k] = t >= 0 ? f32(at(x, c, t, seq, 0)) : t >= -n ? before[n + t] : 0.0f;
        }
    }
}
