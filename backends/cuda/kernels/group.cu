// Slots of a mixture of experts grouped by their expert, and cut into tiles of columns.
#include "common.cuh"

struct Slots { int expert, first, count; };                               // of `order`

// ids [n_used, n_tokens] -> tiles [n_tiles] of up to `columns` slots of one expert (those left over are empty), and order: slots, those of an
// expert side by side. grid: 1; block: 1024; shared: 2 n_expert ints
KERNEL __launch_bounds__(1024) group(Tensor ids, int n_expert, int columns, int n_tiles, Slots * tiles, int * order) {
    DYNAMIC_SHARED(int, count);
    int * next = count + n_expert;
    const int n_used = (int) ids.ne[0], n_slots = n_used * (int) ids.ne[1];
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < n_slots; s += blockDim.x) atomicAdd(&count[*(const int *) at(ids, s % n_used, s / n_used, 0, 0)], 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        int first = 0, tile = 0;
        for (int e = 0; e < n_expert; e++) {
            next[e] = first;
            for (int f = 0; f < count[e]; f += columns) { const Slots t = {e, first + f, min(columns, count[e] - f)}; tiles[tile++] = t; }
            first += count[e];
        }
        for (; tile < n_tiles; tile++) { const Slots none = {0, 0, 0}; tiles[tile] = none; }
    }
    __syncthreads();
    for (int s = threadIdx.x; s < n_slots; s += blockDim.x) order[atomicAdd(&next[*(const int *) at(ids, s % n_used, s / n_used, 0, 0)], 1)] = s;
}
