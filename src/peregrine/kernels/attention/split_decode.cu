// Split-KV decode of few rows for Hopper: `decode_kernel` of dense_triton.py, bit for bit. `merge_kernel` comes next.
//
// A program has all queries of one row and KV head, TILES tiles of 16 (query, head) pairs, and a run of whole splits of
// the keys. One of its warps copies pairs of blocks by TMA into a ring of STAGES places: keys, then their values. Those
// from before this forward are copied while the previous kernel is still running. A tile has WARPS warps: of the scores
// each computes those of 16 keys of a block, of the weighted values some dimensions. Every split's state is stored.
//
// Set when it is compiled (`split_source`): TILES, WARPS (4 or 8), STAGES, GROUP (query heads of a KV head), KV_HEADS,
// DIM, PAGE, INDEX (the type of the page table), ONES (two of them, as one word) and what hopper.cuh needs.

struct Sizes {
  float scale;
  int query_stride, num_pages, max_splits;
};

constexpr int BLOCK = 64, PAIR = 2 * BLOCK;         // keys of a product, and of a place in the ring
constexpr int COLUMN = 64, COLUMNS = DIM / COLUMN;  // entries that TMA copies together
constexpr int PIECE = PAGE < BLOCK ? PAGE : BLOCK, PIECES = PAIR / PIECE;
constexpr int HEADS = GROUP < 16 ? GROUP : 16, QUERIES = 16 / HEADS, HEAD_TILES = (GROUP + HEADS - 1) / HEADS;
constexpr int OWN_BLOCKS = 8 / WARPS;  // of a pair, whose scores a warp computes
constexpr int STEPS = DIM / 16, OCTETS = DIM / 8 / WARPS;  // of scores; of a warp's dimensions
constexpr u32 COLUMN_BYTES = PAIR * COLUMN * 2, PLACE_BYTES = COLUMNS * COLUMN_BYTES;
constexpr u32 WEIGHT_BYTES = 2 * 4 * 32 * 16, TOP_BYTES = 2 * 16 * 4 * 4;  // of a tile and a pair
constexpr u32 QUERY_PITCH = DIM * 2 + 16;  // bytes from one query to the next, so that eight hit all banks
constexpr u32 ROOM = 16 * QUERY_PITCH > WEIGHT_BYTES ? 16 * QUERY_PITCH : WEIGHT_BYTES;  // for queries, then weights
constexpr float LOWEST = -1e30f, SLACK = 8.0f, LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY __int_as_float(0xFF800000)

// `split_of_index` and `start_of_split` of plan.py.
__device__ __forceinline__ int split_of(int index) {
  const int near = min(index, 4096) / 128 + max(min(index, 8192) - 4096, 0) / 256;
  const int far = max(min(index, 16384) - 8192, 0) / 512 + max(min(index, 32768) - 16384, 0) / 1024;
  return near + far + max(index - 32768, 0) / 2048;
}

__device__ __forceinline__ int split_start(int split) {
  const int near = min(split, 32) * 128 + max(min(split, 48) - 32, 0) * 256;
  const int far = max(min(split, 64) - 48, 0) * 512 + max(min(split, 80) - 64, 0) * 1024;
  return near + far + max(split - 80, 0) * 2048;
}

__device__ __forceinline__ float power(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}

__device__ __forceinline__ void meet_in_tile(int tile) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + tile), "n"(32 * WARPS) : "memory");
}

// The eight entries from `octet` * 8 on of a key or value in a place of the ring, whose columns TMA has swizzled.
__device__ __forceinline__ u32 entries_of(u32 place, int key, int octet) {
  return place + octet / 8 * COLUMN_BYTES + key * 128 + ((octet % 8 ^ key % 8) << 4);
}

struct Ring {
  u32 places, ready, empty;
  int place, phase;
  __device__ __forceinline__ u32 memory() const { return places + place * PLACE_BYTES; }
  __device__ __forceinline__ void await_copy() const { await(ready + 8 * place, phase); }
  __device__ __forceinline__ void await_room() const { await(empty + 8 * place, phase ^ 1); }
  __device__ __forceinline__ void next() {
    if (++place == STAGES) place = 0, phase ^= 1;
  }
  __device__ __forceinline__ void release(int lane) {
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * place);
    next();
  }
};

// A row's keys [begin, stop) of one program; `past` of the row are from before this forward, `seen` by its queries.
struct Run {
  int begin, stop, past, seen;
};

// The copying thread: a run's keys and values of one head, which begin at `column`.
__device__ __forceinline__ void copy_pairs(
    const TensorMap& keys, const TensorMap& values, const INDEX* table, const Run& run, int column, Ring ring) {
  bool waited = false;
  int slots[PIECES], next_slots[PIECES];
  const auto find = [&](int (&found)[PIECES], int start) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {  // those past the last key are on the scratch page
      const int index = start + i * PIECE;
      found[i] = index < run.stop ? static_cast<int>(table[index / PAGE]) * PAGE + index % PAGE : index % PAGE;
    }
  };
  find(slots, run.begin);
  for (int start = run.begin; start < run.stop; start += PAIR) {
    find(next_slots, start + PAIR);
#pragma unroll
    for (int which = 0; which < 2; ++which, ring.next()) {
      ring.await_room();
      expect(ring.ready + 8 * ring.place, PLACE_BYTES);
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        if (!waited && start + (i + 1) * PIECE > run.past) {
          asm volatile("griddepcontrol.wait;" ::: "memory");
          waited = true;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          copy_rows(ring.memory() + c * COLUMN_BYTES + i * PIECE * 128, which ? &values : &keys, column + c * COLUMN,
                    slots[i], ring.ready + 8 * ring.place);
      }
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) slots[i] = next_slots[i];
  }
}

// What a thread has of a split's state: two rows, and of their weighted values two columns of each octet.
struct State {
  float top[2], sums[4], acc[OCTETS][4];
  __device__ __forceinline__ void clear() {
    top[0] = top[1] = LOWEST;
#pragma unroll
    for (int n = 0; n < 4; ++n) sums[n] = 0.0f;
#pragma unroll
    for (int i = 0; i < OCTETS * 4; ++i) acc[i / 4][i % 4] = 0.0f;
  }
};

// What a warp of a tile knows.
struct Reader {
  int tile, warp, lane;
  int limits[2];   // keys that its two rows see: lane / 4 of the tile, and eight further on
  float factor;    // of scores
  uint4* weights;  // of the tile: [2 blocks, 4 parts of 16 keys, 32 lanes]
  float* tops;     // of the tile: [2 blocks, 16 rows, 4 parts]
};

// What follows the last key may be NaN, and so is 0 * NaN.
__device__ __forceinline__ void clear_values(u32 values, int first) {
  for (int i = first * 8 + threadIdx.x % (32 * WARPS); i < PAIR * 8; i += 32 * WARPS)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
                   ::"r"(values + c * COLUMN_BYTES + i * 16), "r"(0) : "memory");
}

// Adds two blocks from `start` on to the state of their split.
__device__ __forceinline__ void add_pair(
    State& state, const u32 (&queries)[STEPS][4], const Reader& reader, Ring& ring, int start, int seen) {
  const int lane = reader.lane, part = reader.warp % 4, first_block = OWN_BLOCKS == 1 ? reader.warp / 4 : 0;
  float scores[OWN_BLOCKS][2][4];
#pragma unroll
  for (int i = 0; i < OWN_BLOCKS * 8; ++i) scores[i / 8][i / 4 % 2][i % 4] = 0.0f;
  ring.await_copy();
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int b = 0; b < OWN_BLOCKS; ++b) {
      u32 keys[4];
      const int key = (first_block + b) * BLOCK + 16 * part + lane % 8 + lane / 16 * 8;
      load_matrices(keys, entries_of(ring.memory(), key, 2 * k + lane / 8 % 2));
      multiply(scores[b][0], queries[k], keys[0], keys[1]);
      multiply(scores[b][1], queries[k], keys[2], keys[3]);
    }
  ring.release(lane);
#pragma unroll
  for (int b = 0; b < OWN_BLOCKS; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = MINUS_INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[b][i / 2][2 * h + i % 2];
        const int index = start + (first_block + b) * BLOCK + 16 * part + 8 * (i / 2) + lane % 4 * 2 + i % 2;
        score = index < reader.limits[h] ? score : MINUS_INFINITY;
        most = fmaxf(most, score);
      }
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
      if (lane % 4 == 0) reader.tops[((first_block + b) * 16 + lane / 4 + 8 * h) * 4 + part] = most;
    }
  meet_in_tile(reader.tile);
  float kept[2][2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 most = reinterpret_cast<const float4*>(reader.tops)[b * 16 + lane / 4 + 8 * h];
      const float largest = __fmul_rn(fmaxf(fmaxf(most.x, most.y), fmaxf(most.z, most.w)), reader.factor);
      const float top = largest > __fadd_rn(state.top[h], SLACK) ? largest : state.top[h];
      kept[b][h] = power(__fsub_rn(state.top[h], top));
      state.top[h] = top;
    }
    const int own = b - first_block;
    if (own < 0 || own >= OWN_BLOCKS) continue;
    u32 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &scores[OWN_BLOCKS == 1 ? 0 : b][i / 2][2 * (i % 2)];
      weights[i] = rounded(power(__fmaf_rn(pair[0], reader.factor, -state.top[i % 2])),
                           power(__fmaf_rn(pair[1], reader.factor, -state.top[i % 2])));
    }
    reader.weights[(b * 4 + part) * 32 + lane] = make_uint4(weights[0], weights[1], weights[2], weights[3]);
  }
  ring.await_copy();
  if (start + PAIR > seen) clear_values(ring.memory(), seen - start);
  meet_in_tile(reader.tile);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      state.sums[n] = __fmul_rn(state.sums[n], kept[b][n / 2]);
#pragma unroll
      for (int j = 0; j < OCTETS; ++j) state.acc[j][n] = __fmul_rn(state.acc[j][n], kept[b][n / 2]);
    }
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const uint4 one = reader.weights[(b * 4 + k) * 32 + lane], two = reader.weights[(b * 4 + k + 1) * 32 + lane];
      const u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
      u32 values[OCTETS][4];
#pragma unroll
      for (int j = 0; j < OCTETS; ++j)
        load_transposed(
            values[j], entries_of(ring.memory(), b * BLOCK + 16 * k + lane, OCTETS * reader.warp + j));
      multiply(state.sums, first, ONES, ONES);
#pragma unroll
      for (int j = 0; j < OCTETS; ++j) multiply(state.acc[j], first, values[j][0], values[j][1]);
      multiply(state.sums, second, ONES, ONES);
#pragma unroll
      for (int j = 0; j < OCTETS; ++j) multiply(state.acc[j], second, values[j][2], values[j][3]);
    }
  }
  ring.release(lane);
}

// Whose place among a row's queries and a KV head's group a pair of a tile is.
struct Member {
  int query, head;
  bool live;
  __device__ __forceinline__ Member(int tile, int place, int num_queries)
      : query(tile / HEAD_TILES * QUERIES + place / HEADS), head(tile % HEAD_TILES * HEADS + place % HEADS),
        live(place < QUERIES * HEADS && head < GROUP && query < num_queries) {}
};

// Programs take runs of whole splits with about as many keys each. Of a last block that is not full all keys count, so
// that the last program, whose keys come late, has the fewest.
__device__ __forceinline__ Run own_run(int past, int seen) {
  const i64 whole = (seen + PAIR - 1) / PAIR * PAIR;
  const auto run_start = [&](int program) {
    if (program == gridDim.x) return seen;
    const int index = whole * program / static_cast<int>(gridDim.x), split = split_of(index);
    const int before = split_start(split), after = split_start(split + 1);
    return min(index - before < after - index ? before : after, seen);
  };
  return Run{run_start(blockIdx.x), run_start(blockIdx.x + 1), past, seen};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * TILES + 32) split_decode(
    const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const uint4* q, float2* accs,
    float2* sums, const i64* positions, const i64* q_starts, const i64* past_lens, const INDEX* table,
    const Sizes sizes) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 places = address_of(memory), barriers = places + STAGES * PLACE_BYTES;
  Ring ring{places, barriers, barriers + 8 * STAGES, 0, 0};
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform, for the compiler
  const int head = blockIdx.y, row = blockIdx.z;
  if (threadIdx.x == 0) {
    for (int place = 0; place < STAGES; ++place) {
      new_barrier(ring.ready + 8 * place, 1);
      new_barrier(ring.empty + 8 * place, WARPS * TILES);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int first_token = q_starts[row], num_queries = static_cast<int>(q_starts[row + 1]) - first_token;
  const int num_keys = sizes.num_pages * PAGE, past = past_lens[row];
  int seen = 0;  // by any of the queries
  for (int query = lane; query < num_queries; query += 32)
    seen = max(seen, static_cast<int>(positions[first_token + query]) + 1);
  const Run run = own_run(past, min(__reduce_max_sync(0xFFFFFFFF, seen), num_keys));
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp == WARPS * TILES) {
    if (elected())
      copy_pairs(keys, values, table + static_cast<i64>(row) * sizes.num_pages, run, head * DIM, ring);
    return;
  }
  Reader reader;
  reader.tile = warp / WARPS, reader.warp = warp % WARPS, reader.lane = lane;
  reader.factor = __fmul_rn(sizes.scale, LOG2_E);
  unsigned char* const room = memory + STAGES * (PLACE_BYTES + 16) + reader.tile * ROOM;
  reader.weights = reinterpret_cast<uint4*>(room);
  reader.tops = reinterpret_cast<float*>(memory + STAGES * (PLACE_BYTES + 16) + TILES * ROOM + reader.tile * TOP_BYTES);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Member member(reader.tile, lane / 4 + 8 * h, num_queries);
    reader.limits[h] = member.live ? min(static_cast<int>(positions[first_token + member.query]) + 1, num_keys) : 0;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (run.begin >= run.stop) return;
  u32 queries[STEPS][4];
#pragma unroll
  for (int i = threadIdx.x % (32 * WARPS); i < 16 * (DIM / 8); i += 32 * WARPS) {
    const int place = i / (DIM / 8), octet = i % (DIM / 8);
    const Member member(reader.tile, place, num_queries);
    const i64 from =
        static_cast<i64>(first_token + member.query) * sizes.query_stride + (head * GROUP + member.head) * DIM;
    *reinterpret_cast<uint4*>(room + place * QUERY_PITCH + octet * 16) =
        member.live ? q[from / 8 + octet] : make_uint4(0, 0, 0, 0);
  }
  meet_in_tile(reader.tile);
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
    load_matrices(queries[k], address_of(room) + lane % 16 * QUERY_PITCH + (2 * k + lane / 16) * 16);
  State state;
  state.clear();
  for (int start = run.begin; start < run.stop; start += PAIR) {
    add_pair(state, queries, reader, ring, start, run.seen);
    const int split = split_of(start);
    if (start + PAIR < run.stop && start + PAIR != split_start(split + 1)) continue;
    const i64 tile = (static_cast<i64>(row) * TILES + reader.tile) * KV_HEADS + head;
    const i64 place = (tile * sizes.max_splits + split) * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (reader.warp == 0 && lane % 4 == 0) sums[place + 8 * h] = make_float2(state.top[h], state.sums[2 * h]);
#pragma unroll
      for (int j = 0; j < OCTETS; ++j)
        accs[(place + 8 * h) * (DIM / 2) + (OCTETS * reader.warp + j) * 4 + lane % 4] =
            make_float2(state.acc[j][2 * h], state.acc[j][2 * h + 1]);
    }
    state.clear();
  }
}
