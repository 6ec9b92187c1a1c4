// What recurrences share: which states are kept.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float f32(const char * p) { return *(const float *) p; }

#ifndef LANES
#define LANES 8                                         // of a warp's state: values per lane, 32 LANES in all
#endif

// Where the state after token t goes, as one of `n` snapshots (the last first); -1: nowhere.
__device__ __forceinline__ int snapshot(int t, int n_tokens, int n) { return n_tokens - 1 - t < n ? n_tokens - 1 - t : -1; }
