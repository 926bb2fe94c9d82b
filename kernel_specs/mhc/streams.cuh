// Rows of residual streams in vectors of 8 bfloat16 columns. Needs accesses.cuh.
namespace mhc {
constexpr int kStreams = 4, kVector = 8, kVectorBytes = 16;

// ---- places

struct Place {
  i64 token;
  int vector;
  bool inside;
};

// Vectors of all rows are numbered one behind the other, below 2**32; a thread has the one with its number in the grid.
__device__ __forceinline__ Place place_of_thread(int num_tokens, int row_vectors) {
  const unsigned number = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned token = number / unsigned(row_vectors);
  return {token, int(number - token * row_vectors), token < unsigned(num_tokens)};
}

// A token has a row of CTAs, a thread the vector with its number in there. Tokens are numbered through gridDim.y and gridDim.z.
__device__ __forceinline__ Place place_in_row(int num_tokens, int row_vectors) {
  const unsigned token = blockIdx.z * gridDim.y + blockIdx.y;
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  return {token, vector, token < unsigned(num_tokens) && vector < row_vectors};
}

// Byte offset of a vector in a tensor (n, kStreams, H) without gaps.
__device__ __forceinline__ i64 stream_offset(i64 token, int stream, int vector, int row_vectors) {
  return ((token * kStreams + stream) * row_vectors + vector) * kVectorBytes;
}

// ---- values

struct Vector {
  unsigned words[4];

  __device__ __forceinline__ static Vector load(const char* from) {
    // Not past L1: behind a kernel that does not, such loads take 4 to 6 % longer, time and again (H200).
    const uint4 v = memory::load_16(from);
    return { {v.x, v.y, v.z, v.w} };
  }
  // Past L1: faster of a little data, and as fast of much where more is stored than loaded.
  __device__ __forceinline__ static Vector load_once(const char* from) {
    const uint4 v = memory::load_streamed(from);
    return { {v.x, v.y, v.z, v.w} };
  }
  __device__ __forceinline__ void store(char* to) const { store_once(static_cast<void*>(to), make_uint4(words[0], words[1], words[2], words[3])); }
  __device__ __forceinline__ float value(int i) const { return i % 2 ? bf16_high(words[i / 2]) : bf16_low(words[i / 2]); }
};

struct Mix {
  float of[kStreams];

  __device__ __forceinline__ static Mix load(const float* from) {
    const float4 v = load_cached(from);
    return { {v.x, v.y, v.z, v.w} };
  }
};

// The vector of `value_of(column)`, rounded to bfloat16.
template <class Function>
__device__ __forceinline__ Vector vector_of(const Function& value_of) {
  Vector result;
#pragma unroll
  for (int w = 0; w < 4; ++w) result.words[w] = to_bf16x2(value_of(2 * w), value_of(2 * w + 1));
  return result;
}

// Column i of the sum of the streams times their mix, added in increasing order.
__device__ __forceinline__ float mixed(const Mix& mix, const Vector (&streams)[kStreams], int i) {
  float sum = __fmul_rn(mix.of[0], streams[0].value(i));
#pragma unroll
  for (int s = 1; s < kStreams; ++s) sum = __fmaf_rn(mix.of[s], streams[s].value(i), sum);
  return sum;
}

// The sum of the products of two vectors' columns.
__device__ __forceinline__ float dot(const Vector& a, const Vector& b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = __fmaf_rn(a.value(i), b.value(i), sum);
  return sum;
}

// ---- sums over the columns of a token, which a CTA of kWarps warps has

// Writes the sums over all threads to `to`: lanes as a binary tree, then warps in order. `shared`: kWarps * kCount floats.
template <int kWarps, int kCount>
__device__ __forceinline__ void store_sums(float* to, float (&sums)[kCount], float* shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[c] += __shfl_xor_sync(0xFFFFFFFFu, sums[c], step);
    if (threadIdx.x % 32 == 0) shared[warp * kCount + c] = sums[c];
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    float sum = shared[threadIdx.x];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += shared[w * kCount + threadIdx.x];
    to[threadIdx.x] = sum;
  }
}
}  // namespace mhc
