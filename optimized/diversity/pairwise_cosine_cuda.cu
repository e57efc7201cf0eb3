// Cosine distances of all pairs of rows, and their gradient: float32, plain CUDA (polychromic, technique 003.5).
// No PyTorch header, so that nvcc compiles this file alone; pairwise_cosine_cuda_binding.cpp binds it.

#include <cuda_runtime.h>

namespace {

constexpr float kMinNorm = 1e-12f;
// 1 / kMinNorm as float32 has it: the inverse length of a row whose length is clamped.
constexpr float kClamped = 1.0f / kMinNorm;

// A block of 256 threads makes a 64 x 64 tile, 4 x 4 a thread: each value read from shared memory is used 4 times.
constexpr int kTile = 64;
constexpr int kPerThread = 4;
constexpr int kThreads = (kTile / kPerThread) * (kTile / kPerThread);
// One warp reads 32 consecutive floats of a row: 128 bytes, one transaction.
constexpr int kStep = 32;
// Rows of shared memory start 16 bytes apart modulo the banks, and stay aligned for 16-byte reads.
constexpr int kPitch = kTile + 4;
constexpr int kWarp = 32;
constexpr int kRowsPerBlock = kThreads / kWarp;

__device__ float warp_sum(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// inverse[i] = 1 / max(|e_i|, 1e-12), a warp a row. Where the squares overflow, a finite row counts as infinitely
// long (0), and one that holds an infinity is NaN.
__global__ void inverse_lengths(const float* __restrict__ e, float* __restrict__ inverse, int n, int width) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= n) return;
  float squares = 0.0f, spoiled = 0.0f;
  for (int k = threadIdx.x % kWarp; k < width; k += kWarp) {
    const float value = e[static_cast<size_t>(row) * width + k];
    squares += value * value;
    spoiled += value * 0.0f;
  }
  squares = warp_sum(squares);
  spoiled = warp_sum(spoiled);
  if (threadIdx.x % kWarp == 0) {
    float length = sqrtf(squares);
    if (length < kMinNorm) length = kMinNorm;
    if (isinf(squares)) length = squares + spoiled;
    inverse[row] = 1.0f / length;
  }
}

// a[k][row] = e[first + row][start + k], zero outside.
__device__ void load_rows(float (*a)[kPitch], const float* __restrict__ e, int first, int start, int n, int width) {
  const int k = threadIdx.x % kStep;
  for (int row = threadIdx.x / kStep; row < kTile; row += kThreads / kStep) {
    const bool inside = first + row < n && start + k < width;
    a[k][row] = inside ? e[static_cast<size_t>(first + row) * width + start + k] : 0.0f;
  }
}

// total += a' b over one step. Each step is summed on its own, which keeps long sums accurate.
__device__ void multiply(float (*a)[kPitch], float (*b)[kPitch], float (&total)[kPerThread][kPerThread]) {
  const int x = threadIdx.x % (kTile / kPerThread) * kPerThread;
  const int y = threadIdx.x / (kTile / kPerThread) * kPerThread;
  float sum[kPerThread][kPerThread] = {};
#pragma unroll
  for (int k = 0; k < kStep; ++k) {
    const float4 left = *reinterpret_cast<const float4*>(&a[k][y]);
    const float4 right = *reinterpret_cast<const float4*>(&b[k][x]);
    const float l[kPerThread] = {left.x, left.y, left.z, left.w};
    const float r[kPerThread] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int p = 0; p < kPerThread; ++p)
#pragma unroll
      for (int q = 0; q < kPerThread; ++q) sum[p][q] = fmaf(l[p], r[q], sum[p][q]);
  }
#pragma unroll
  for (int p = 0; p < kPerThread; ++p)
#pragma unroll
    for (int q = 0; q < kPerThread; ++q) total[p][q] += sum[p][q];
}

// Tiles on and above the diagonal are computed and mirrored; the mirror image goes through shared memory, so that
// both are written row by row.
__global__ void __launch_bounds__(kThreads)
    distances_kernel(const float* __restrict__ e, const float* __restrict__ inverse, float* __restrict__ distances,
                     int n, int width) {
  if (blockIdx.x < blockIdx.y) return;
  __shared__ __align__(16) float a[kStep][kPitch];
  __shared__ __align__(16) float b[kStep][kPitch];
  __shared__ float tile[kTile][kTile + 1];
  const int first_i = blockIdx.y * kTile, first_j = blockIdx.x * kTile;
  float total[kPerThread][kPerThread] = {};
  for (int start = 0; start < width; start += kStep) {
    load_rows(a, e, first_i, start, n, width);
    load_rows(b, e, first_j, start, n, width);
    __syncthreads();
    multiply(a, b, total);
    __syncthreads();
  }
  const int x = threadIdx.x % (kTile / kPerThread) * kPerThread;
  const int y = threadIdx.x / (kTile / kPerThread) * kPerThread;
#pragma unroll
  for (int p = 0; p < kPerThread; ++p) {
    const int i = first_i + y + p;
    const float inverse_i = i < n ? inverse[i] : 0.0f;
#pragma unroll
    for (int q = 0; q < kPerThread; ++q) {
      const int j = first_j + x + q;
      const float inverse_j = j < n ? inverse[j] : 0.0f;
      // Beside an infinitely long row the cosine is 0 (or NaN), whatever the product overflowed to.
      const bool endless = inverse_i == 0.0f || inverse_j == 0.0f;
      float distance = 1.0f - (endless ? inverse_i * inverse_j : total[p][q] * inverse_i * inverse_j);
      // A row with a direction is at distance 0 from itself, exactly.
      if (i == j && inverse_i > 0.0f && inverse_i < kClamped) distance = 0.0f;
      tile[y + p][x + q] = distance;
    }
  }
  __syncthreads();
  for (int cell = threadIdx.x; cell < kTile * kTile; cell += kThreads) {
    const int row = cell / kTile, column = cell % kTile;
    if (first_i + row < n && first_j + column < n)
      distances[static_cast<size_t>(first_i + row) * n + first_j + column] = tile[row][column];
    if (blockIdx.x != blockIdx.y && first_j + row < n && first_i + column < n)
      distances[static_cast<size_t>(first_j + row) * n + first_i + column] = tile[column][row];
  }
}

// d_unit[i] = -sum_j (G[i][j] + G[j][i]) unit[j], where unit[j] = e[j] * inverse[j].
__global__ void __launch_bounds__(kThreads)
    unit_gradient(const float* __restrict__ e, const float* __restrict__ inverse, const float* __restrict__ grad,
                  float* __restrict__ d_unit, int n, int width) {
  __shared__ __align__(16) float h[kStep][kPitch];
  __shared__ __align__(16) float unit[kStep][kPitch];
  const int first_i = blockIdx.y * kTile, first_k = blockIdx.x * kTile;
  float total[kPerThread][kPerThread] = {};
  for (int start = 0; start < n; start += kStep) {
    load_rows(h, grad, first_i, start, n, n);
    __syncthreads();
    for (int cell = threadIdx.x; cell < kStep * kTile; cell += kThreads) {
      const int row = cell / kTile, column = cell % kTile;
      const int j = start + row, i = first_i + column, k = first_k + column;
      if (j < n && i < n) h[row][column] += grad[static_cast<size_t>(j) * n + i];
      // A row's distance from itself is constant, except where its length is clamped.
      if (j < n && i == j && inverse[i] < kClamped) h[row][column] = 0.0f;
      unit[row][column] = j < n && k < width ? e[static_cast<size_t>(j) * width + k] * inverse[j] : 0.0f;
    }
    __syncthreads();
    multiply(h, unit, total);
    __syncthreads();
  }
  const int x = threadIdx.x % (kTile / kPerThread) * kPerThread;
  const int y = threadIdx.x / (kTile / kPerThread) * kPerThread;
  for (int p = 0; p < kPerThread; ++p)
    for (int q = 0; q < kPerThread; ++q) {
      const int i = first_i + y + p, k = first_k + x + q;
      if (i < n && k < width) d_unit[static_cast<size_t>(i) * width + k] = -total[p][q];
    }
}

// From the gradient of a unit row to that of the row, in place, a warp a row: what lies along the row falls away.
__global__ void project(const float* __restrict__ e, const float* __restrict__ inverse, float* __restrict__ d, int n,
                        int width) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= n) return;
  const float scale = inverse[row];
  e += static_cast<size_t>(row) * width;
  d += static_cast<size_t>(row) * width;
  float along = 0.0f;
  for (int k = threadIdx.x % kWarp; k < width; k += kWarp) along += e[k] * scale * d[k];
  along = warp_sum(along);
  // Where the length is clamped it is a constant, and there is nothing to take away.
  const bool clamped = scale >= kClamped;
  for (int k = threadIdx.x % kWarp; k < width; k += kWarp)
    d[k] = (clamped ? d[k] : d[k] - e[k] * scale * along) * scale;
}

unsigned int ceil_div(int a, int b) { return static_cast<unsigned int>((a + b - 1) / b); }

}  // namespace

// e [n, width] → distances [n, n] and inverse [n], contiguous, on the stream; returns a cudaError_t.
extern "C" int pairwise_cosine_forward(const float* e, float* inverse, float* distances, int n, int width,
                                       void* stream) {
  if (n == 0) return 0;
  auto queue = static_cast<cudaStream_t>(stream);
  const unsigned int tiles = ceil_div(n, kTile);
  inverse_lengths<<<ceil_div(n, kRowsPerBlock), kThreads, 0, queue>>>(e, inverse, n, width);
  distances_kernel<<<dim3(tiles, tiles), kThreads, 0, queue>>>(e, inverse, distances, n, width);
  return static_cast<int>(cudaGetLastError());
}

// grad [n, n] and what the forward read and wrote → d_e [n, width]; returns a cudaError_t.
extern "C" int pairwise_cosine_backward(const float* e, const float* inverse, const float* grad, float* d_e, int n,
                                        int width, void* stream) {
  if (n == 0 || width == 0) return 0;
  auto queue = static_cast<cudaStream_t>(stream);
  unit_gradient<<<dim3(ceil_div(width, kTile), ceil_div(n, kTile)), kThreads, 0, queue>>>(e, inverse, grad, d_e, n,
                                                                                         width);
  project<<<ceil_div(n, kRowsPerBlock), kThreads, 0, queue>>>(e, inverse, d_e, n, width);
  return static_cast<int>(cudaGetLastError());
}
