// What the linears in CUDA C++ share: a ring of STAGES places between the copying and the multiplying warps, how the
// matrix unit reads operands, and what follows a product. Units of squares are set when it is compiled.

struct Sizes {
  int rows, outputs, inputs;
  float eps, coarse_unit, fine_unit;  // of the squares that scale rows
};

constexpr float BELOW_ONE = 0.99999994f;

// A matrix in shared memory for the matrix unit: rows of 128 bytes, swizzled by the copy in groups of eight.
__device__ __forceinline__ u64 matrix_at(u32 place) {
  return static_cast<u64>((place & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

struct Ring {
  u32 places, ready, empty;
  int place, phase;
  __device__ __forceinline__ u32 memory(u32 place_bytes) const { return places + place * place_bytes; }
  __device__ __forceinline__ void next() {
    if (++place == STAGES) place = 0, phase ^= 1;
  }
};

// The copying thread: weights of the first steps are requested before the previous kernel has ended.
template <class Weights, class Rows>
__device__ __forceinline__ void copy_steps(Ring& ring, int steps, Weights request_weights, Rows request_rows) {
  const int early = min(STAGES, steps);
  for (int step = 0; step < early; ++step, ring.next()) request_weights(step);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  ring.place = ring.phase = 0;
  for (int step = 0; step < early; ++step, ring.next()) request_rows(step);
  for (int step = early; step < steps; ++step, ring.next()) {
    await(ring.empty + 8 * ring.place, ring.phase ^ 1);
    request_weights(step);
    request_rows(step);
  }
}

// The multiplying warps: `add_step` starts the products of one step, which are added to the sums.
template <int SUMS, class Step>
__device__ __forceinline__ void multiply_steps(float (&sums)[SUMS], Ring& ring, int steps, int lane, Step add_step) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  for (int step = 0; step < steps; ++step) {
    await(ring.ready + 8 * ring.place, ring.phase);
    add_step();
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    // The step before is done; nobody waits for the last places.
    if (step > 0 && step + STAGES <= steps && lane == 0) arrive(ring.empty + 8 * ((ring.place + STAGES - 1) % STAGES));
    ring.next();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
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
