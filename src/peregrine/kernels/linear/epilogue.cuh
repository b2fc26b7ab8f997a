// What the linears in CUDA C++ share: how the matrix unit reads their operands, and what follows a product. Units of
// squares are set when it is compiled.

struct Sizes {
  int rows, outputs, inputs;
  float eps, coarse_unit, fine_unit;  // of the squares that scale rows
};

constexpr float BELOW_ONE = 0.99999994f;

// A matrix in shared memory for the matrix unit: rows of 128 bytes, swizzled by the copy in groups of eight.
__device__ __forceinline__ u64 matrix_at(u32 place) {
  return static_cast<u64>((place & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// 1 / the root mean square of a row, see `root_mean_square` in kernels/residual.
__device__ __forceinline__ float row_factor(const i64* squares, const Sizes& sizes) {
  const i64 coarse = squares[0], fine = squares[1];
  const bool small = coarse < static_cast<i64>(sizes.inputs) * SMALL_UNITS;
  const float sum = __ll2float_rn(small ? fine : coarse);
  return divided(1.0f, __fsqrt_rn(__fmaf_rn(sum, small ? sizes.fine_unit : sizes.coarse_unit, sizes.eps)));
}

__device__ __forceinline__ float scaled_sum(float sum, float factor, bool scales, float bias, bool biased) {
  if (!scales) return biased ? __fadd_rn(sum, bias) : sum;
  return biased ? __fmaf_rn(sum, factor, bias) : __fmul_rn(sum, factor);
}

// A square in coarse or fine units; 0 beyond `most`.
__device__ __forceinline__ i64 counted(float value, float most, float unit) {
  const float square = __fmul_rn(value, value);
  return __float2ll_rz(__fmul_rn(square <= most ? square : 0.0f, unit));
}

__device__ __forceinline__ float weighted(float value, float weight) {
  return __fmul_rn(value, __fmul_rn(value, value) <= MAX_SQUARE ? weight : __int_as_float(0x7FC00000));
}
