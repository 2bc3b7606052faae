#pragma once
// The persistent kernel of the product over packed weights. See nf4_tile_sm90.cuh for the roles.

#include "common/launch.cuh"
#include "quant/decode_sm90.cuh"
#include "quant/narrow_products_sm90.cuh"
#include "quant/nf4_load_sm90.cuh"

namespace optimizer::nf4_product {

// From a consumer's sums to rows of the result: bias, gate, one rounding, words of two columns.

// What a consumer's threads need beside the sums of a tile. The slots' loads begin with the tile,
// the gates' follow before its last products have ended.
template <int kTokens>
class TileExtras {
 public:
  __device__ __forceinline__ TileExtras(const Arguments& p, const TileAt& where)
      : p_(p), where_(where), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {
    const int* slots = reinterpret_cast<const int*>(p.slots);  // int64 below 2^31
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_ + i * kWarpgroup;
      gate_[i] = 1.0f;
      if (row < where.rows && (p.scatter || p.gates != nullptr)) {
        slot_[i] = slots[2 * (where.row + row)];
      }
    }
  }

  __device__ __forceinline__ void load_gates() {
    if (p_.gates == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (thread_ + i * kWarpgroup < where_.rows) gate_[i] = p_.gates[slot_[i]];
    }
  }

  // A warpgroup_sync before, nobody reads the tables; one later everybody sees them.
  template <typename Map>
  __device__ __forceinline__ void publish(const Map& at, int consumer) const {
    int* targets = at.targets(consumer);
    float* gates = at.gates(consumer);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_ + i * kWarpgroup;
      if (row >= where_.rows) continue;
      targets[row] = p_.scatter ? slot_[i] : where_.row + row;
      gates[row] = gate_[i];
    }
  }

 private:
  static constexpr int kRows = (kTokens + kWarpgroup - 1) / kWarpgroup;  // per thread
  static_assert(kRows <= 2);

  const Arguments& p_;
  const TileAt& where_;
  const int thread_;
  int slot_[kRows] = {};
  float gate_[kRows];
};

// Bias and gate for the columns `column` and the next; rows of the result, 32 bytes of 4 at a time
// (along), or two halves of 64 bytes by neighbouring warps (across).
template <int kN>
__device__ __forceinline__ void write_rows(const Arguments& p, const float (&sum)[kN / 2],
                                           const float2& bias, const int* targets,
                                           const float* gates, int rows, int column) {
  char* out = p.out + static_cast<int64_t>(column) * 2;
  const int64_t pitch = static_cast<int64_t>(p.columns) * 2;
  const int first = threadIdx.x % 4 * 2;
  const bool gated = p.gates != nullptr;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int row = j * 8 + first;  // and the next; behind the rows tables hold what they held
    if (row >= rows) break;
    const int2 target = *reinterpret_cast<const int2*>(targets + row);
    const float2 gate = gated ? *reinterpret_cast<const float2*>(gates + row) : float2{1.0f, 1.0f};
    const uint32_t pair = rounded_pair(__fmul_rn(__fadd_rn(sum[4 * j], bias.x), gate.x),
                                       __fmul_rn(__fadd_rn(sum[4 * j + 2], bias.y), gate.x));
    *reinterpret_cast<uint32_t*>(out + target.x * pitch) = pair;
    if (row + 1 < rows) {
      const uint32_t next = rounded_pair(__fmul_rn(__fadd_rn(sum[4 * j + 1], bias.x), gate.y),
                                         __fmul_rn(__fadd_rn(sum[4 * j + 3], bias.y), gate.y));
      *reinterpret_cast<uint32_t*>(out + target.y * pitch) = next;
    }
  }
}

// x / (1 + 2^(-x log2 e)) by the instructions of Triton's, whose bits `_glu` of rows_triton.py
// gives.
__device__ __forceinline__ float silu(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  float power, inverse;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-x, kLog2E)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(inverse) : "f"(1.0f), "f"(__fadd_rn(power, 1.0f)));
  return __fmul_rn(inverse, x);
}

// Of two columns, each rounded before.
__device__ __forceinline__ uint32_t activated_pair(uint32_t gate, uint32_t up) {
  const auto wide = [](uint32_t pair) {
    return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  };
  const float2 gates = wide(gate), ups = wide(up);
  return rounded_pair(__fmul_rn(silu(gates.x), ups.x), __fmul_rn(silu(gates.y), ups.y));
}

// Columns `column` and the next of gate, those of up, and what becomes of them; rows as above.
template <int kN>
__device__ __forceinline__ void write_activated(const Arguments& p, const float (&gate)[kN / 2],
                                                const float (&up)[kN / 2], const TileAt& where,
                                                int column) {
  const int width = p.columns / 2;
  if (column >= width) return;
  float2 gate_bias{}, up_bias{};
  if (p.bias != nullptr) {
    const float* from = p.bias + static_cast<int64_t>(where.expert) * p.columns + column;
    gate_bias = {from[0], from[1]};
    up_bias = {from[width], from[width + 1]};
  }
  const int first = static_cast<int>(threadIdx.x) % 4 * 2;
  int64_t at = (static_cast<int64_t>(where.row + first) * width + column) * 2;  // of activated
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (j * 8 + first + i >= where.rows) return;
      const uint32_t gates = rounded_pair(__fadd_rn(gate[4 * j + i], gate_bias.x),
                                          __fadd_rn(gate[4 * j + 2 + i], gate_bias.y));
      const uint32_t ups = rounded_pair(__fadd_rn(up[4 * j + i], up_bias.x),
                                        __fadd_rn(up[4 * j + 2 + i], up_bias.y));
      if (p.out != nullptr) {
        char* out = p.out + 2 * at - 2 * column;
        *reinterpret_cast<uint32_t*>(out) = gates;
        *reinterpret_cast<uint32_t*>(out + 2 * width) = ups;
      }
      *reinterpret_cast<uint32_t*>(p.activated + at) = activated_pair(gates, ups);
      at += (i == 0 ? 1 : 7) * 2 * width;
    }
  }
}

// Rows of sentinels, behind the experts' rows, are zero.
template <int kThreads>  // that clear
__device__ __forceinline__ void clear_sentinels(const Arguments& p, char* to, int columns,
                                                int first) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  for (int row = first + static_cast<int>(blockIdx.x); row < p.rows;
       row += static_cast<int>(gridDim.x)) {
    const int64_t target = p.scatter ? p.slots[row] : row;
    auto* out = reinterpret_cast<uint32_t*>(to + target * columns * 2);
    for (int i = thread; i < columns / 2; i += kThreads) out[i] = 0;
  }
}

template <int... kWidths>
struct WidthList {
  static constexpr int kCount = sizeof...(kWidths);
  static constexpr int kAt[] = {kWidths...};
};

// Work of the first width of a list that holds `rows`.
template <typename List, int kAt = 0, typename Work>
__device__ __forceinline__ void first_width(int rows, const Work& work) {
  constexpr int kWidth = List::kAt[kAt];
  if constexpr (kAt + 1 == List::kCount) {
    work(std::integral_constant<int, kWidth>{});
  } else {
    if (rows <= kWidth) {
      work(std::integral_constant<int, kWidth>{});
    } else {
      first_width<List, kAt + 1>(rows, work);
    }
  }
}

// One consumer's tiles. What a tile begins with is decoded beside the last products of the tile
// before, whose sums are written meanwhile.
//
// A part is decoded beside the products of the part before, in registers of its own. The sums of
// some and of many rows leave none for that: halves of a part take turns there.
template <bool kAlong, Format kFormat, bool kActivates, Rows kRows>
class Consumer {
 public:
  using Map = SharedMap<kAlong, kFormat, kRows>;

  __device__ __forceinline__ Consumer(const Arguments& p, const Map& at, int consumer)
      : p_(p),
        at_(at),
        consumer_(consumer),
        stages_((p.depth + Map::kStageDepth - 1) / Map::kStageDepth),
        rank_stages_((p.rank + kDepth - 1) / kDepth),
        rows_start_(sm90::matrix_descriptor(at.rows(0))),
        decode_(p, consumer) {}

  __device__ __forceinline__ void run() {
    const int tiles = tile_count(p_, at_);
    bool more = dealt_tile(0) < tiles;
    if (more) begin_tile(even_);
    for (int round = 1; more; ++round) {
      const int4 place = *at_.place(slot_);
      const TileAt where{place.x, place.y, place.z, place.w};
      more = dealt_tile(round) < tiles;
      if constexpr (kBranches) {
        process<Map::kTokens>(where, more);
      } else if constexpr (kFormat == Format::kFourBit) {
        process_by_least<64, 80, 96, 128, 144, 160, 176, 192, 240, Map::kTokens>(where, more);
      } else if constexpr (kFormat == Format::kMxfp4) {  // fewer, for the compiler's sake
        process_by_least<64, 128, 144, 160, 192, 240, Map::kTokens>(where, more);
      } else {  // more serialise all of the products: registers are short
        process_by_least<80, Map::kTokens>(where, more);
      }
    }
    const int first = at_.offsets()[p_.experts];
    constexpr int kCleaners = Map::kConsumers * kWarpgroup;
    if (!kActivates || p_.out != nullptr) {
      clear_sentinels<kCleaners>(p_, p_.out, p_.columns, first);
    }
    if constexpr (kActivates) clear_sentinels<kCleaners>(p_, p_.activated, p_.columns / 2, first);
  }

 private:
  using Source = Decoder<kAlong, kFormat, Map>;
  using Fetched = typename Source::Fetched;
  using Operand = uint32_t[kSteps][4];
  // Most stages of the rank between a tile's last stage and the first of the next: these must not
  // wait for each other to be released.
  static constexpr int kRankStagesPassed = 1;
  static_assert(Map::kStages >= 2 + kRankStagesPassed);
  static constexpr int kBoxes = Map::kBoxes;
  static constexpr bool kLoadsEarly = kBoxes == 1 && kRows == Rows::kMost;  // LoRA's factor
  static constexpr bool kBranches = kRows != Rows::kMost;                   // for the width
  // ptxas closes a group at the end of a branch, so one that is closed behind it is empty and no
  // products are left under way; but across it serialises those by halves if they close inside.
  static constexpr bool kCommitsInside = kAlong || kRows != Rows::kSome;
  static constexpr bool kByHalves = kBranches && kRows != Rows::kFew;
  using Widths = std::conditional_t<kRows == Rows::kFew, WidthList<16, 48>,
                                    std::conditional_t<kRows == Rows::kSome, WidthList<48, 64, 80>,
                                                       WidthList<96, 128, 144, 160>>>;
  template <int kN>
  using Sums = float[kBoxes][kN / 2];

  // By the narrowest instruction that holds the tile's rows. Means of 64, 128, ... rows per expert
  // are what powers of two give: half of the experts have a few more, so widths lie close there.
  template <int kN, int... kWider>
  __device__ __forceinline__ void process_by_least(const TileAt& where, bool more) {
    static_assert(kN % kHeightStep == 0);
    if constexpr (sizeof...(kWider) == 0) {
      process<kN>(where, more);
    } else if (where.rows <= kN) {
      process<kN>(where, more);
    } else {
      process_by_least<kWider...>(where, more);
    }
  }

  template <int kN>
  __device__ __forceinline__ void process(const TileAt& where, bool more) {
    rows_ = __shfl_sync(0xffffffff, where.rows, 0);
    TileExtras<Map::kTokens> extras(p_, where);
    const int warp = threadIdx.x % kWarpgroup / 32, group = threadIdx.x % 32 / 4;
    const int column = where.column + consumer_ * kPartColumns +
                       pair_column<kAlong, kPerByte<kFormat>>(warp, group);
    Factor factor(p_, where, column);
    if constexpr (kLoadsEarly) factor.load_first();
    // Set to zero, not overwritten by the first product: what only that defines lives, for the
    // compiler, through the whole loop over tiles, every kN's sums beside each other.
    Sums<kN> sum = {};
    const bool early = more && rank_stages_ <= kRankStagesPassed;
    Ring<Map::kStages> rank_ring = ring_;
    bool swapped = false;
    if constexpr (kByHalves) {
      multiply_by_halves<kN>(sum[0], early, rank_ring);
    } else {
      swapped = multiply<kN>(sum, early, rank_ring);
    }
    extras.load_gates();
    if (!early) rank_ring = ring_;
    if (p_.rank != 0) {
      if constexpr (kBoxes == 1) {
        add_low_rank<kN>(sum[0], factor, rank_ring);
      } else {
        const Factor second(p_, where, column + p_.box_columns);
        add_low_rank<kN>(sum, factor, second, rank_ring);
      }
    }
    if (!early) ring_ = rank_ring;
    sm90::products_wait<0>();
    sm90::pin(sum);
    release(before_);
    if (swapped) {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) even_[i / 4][i % 4] = odd_[i / 4][i % 4];
    }
    if (more && !early) begin_tile(even_);

    if constexpr (kActivates) {
      write_activated<kN>(p_, sum[0], sum[1], where, column);
    } else {
      sm90::warpgroup_sync(1 + consumer_);
      extras.publish(at_, consumer_);
      sm90::warpgroup_sync(1 + consumer_);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        write<kN>(sum[box], where, column + box * Map::kBoxColumns);
      }
    }
    // Else the next tile's products begin, for the compiler, where lanes have parted: it would wait
    // for each of them.
    __syncwarp();
  }

  template <int kN>
  __device__ __forceinline__ void write(const float (&sum)[kN / 2], const TileAt& where,
                                        int column) const {
    if (column >= p_.columns) return;
    float2 bias{};
    if (p_.bias != nullptr) {
      const float* from = p_.bias + static_cast<int64_t>(where.expert) * p_.columns + column;
      bias = {from[0], from[1]};
    }
    write_rows<kN>(p_, sum, bias, at_.targets(consumer_), at_.gates(consumer_), where.rows, column);
  }

  // sum (64 columns of every box x rows) = W x^T. A part, a box or a half of a stage, is decoded
  // while the products of the part before run; with `early` behind the last one the next tile's
  // first, past the rank's, which begin at `rank_ring`. Returns whether it is in odd_.
  template <int kN>
  __device__ __forceinline__ bool multiply(Sums<kN>& sum, bool early,
                                           Ring<Map::kStages>& rank_ring) {
    constexpr bool kPairs = Map::kParts == 2;
    const int parts = Map::kParts * stages_;
    for (int part = 1;; part += 2) {
      if (!kPairs && part == parts) {
        add_last_part<kN>(sum[0], even_, odd_, part > 1, early, rank_ring);
        return early;
      }
      add_part<kN, true>(sum[0], even_, odd_, part > 1);
      if (part + 1 == parts) {
        add_last_part<kN>(sum[kBoxes - 1], odd_, even_, !kPairs, early, rank_ring);
        return false;
      }
      add_part<kN, false>(sum[kBoxes - 1], odd_, even_, !kPairs);
    }
  }

  // The products of the part in `a`; `next` becomes the next one. Half of the products are handed
  // on before, half between the two halves of its decoding; of few rows all before, since each time
  // costs a branch there. kOdd: of `next`. holds: whether the part before was its stage's last.
  template <int kN, bool kOdd>
  __device__ __forceinline__ void add_part(float (&sum)[kN / 2], const Operand& a, Operand& next,
                                           bool holds) {
    constexpr int kFirst = kRows == Rows::kFew ? kSteps : kSteps / 2;
    const uint64_t b = rows_of(!kOdd);
    add_steps<kN, 0, kFirst>(sum, a, b);
    free_part_before(holds);
    Fetched fetched;
    fetch<kOdd>(fetched);
    decode_.template decode<0>(next[0], fetched);
    decode_.template decode<1>(next[1], fetched);
    if constexpr (kFirst < kSteps) add_steps<kN, kFirst, kSteps>(sum, a, b);
    decode_.fetch_last(fetched);
    decode_.template decode<2>(next[2], fetched);
    decode_.template decode<3>(next[3], fetched);
  }

  template <int kN>
  __device__ __forceinline__ void add_last_part(float (&sum)[kN / 2], const Operand& a,
                                                Operand& next, bool holds, bool early,
                                                Ring<Map::kStages>& rank_ring) {
    add_steps<kN, 0, 4>(sum, a, rows_of(Map::kHalves == 2));
    free_part_before(holds);
    pass_rank(next, early, rank_ring);
  }

  // Behind a tile's last products: the rank's stages begin here, and `early` the next tile's first
  // behind them.
  __device__ __forceinline__ void pass_rank(Operand& next, bool early,
                                            Ring<Map::kStages>& rank_ring) {
    rank_ring = ring_;
    if (!early) return;
    ring_.skip(rank_stages_);
    begin_tile(next);
  }

  // The same with one operand, even_: half of a part is decoded beside the products of the other.
  template <int kN>
  __device__ __forceinline__ void multiply_by_halves(float (&sum)[kN / 2], bool early,
                                                     Ring<Map::kStages>& rank_ring) {
    constexpr bool kPairs = Map::kParts == 2;
    const int parts = Map::kParts * stages_;
    for (int part = 1;; part += 2) {
      add_halves<kN, false>(sum, part > 1);
      if (!kPairs && part == parts) break;
      begin_part<true>(even_);
      add_halves<kN, true>(sum, !kPairs);
      if (part + 1 == parts) break;
      begin_part<false>(even_);
    }
    pass_rank(even_, early, rank_ring);
  }

  // Of a part that was begun; kOdd: whether its number in its tile is odd.
  template <int kN, bool kOdd>
  __device__ __forceinline__ void add_halves(float (&sum)[kN / 2], bool holds) {
    const uint64_t b = rows_of(kOdd);
    add_steps<kN, 0, 2>(sum, even_, b);
    free_part_before(holds);
    decode_.fetch_last(fetched_);
    decode_.template decode<2>(even_[2], fetched_);
    decode_.template decode<3>(even_[3], fetched_);
    add_steps<kN, 2, 4>(sum, even_, b);
    sm90::products_wait<1>();
  }

  // What a part's products begin with: its first half, or all of it.
  template <bool kOdd>
  __device__ __forceinline__ void begin_part(Operand& a) {
    fetch<kOdd>(fetched_);
    decode_.template decode<0>(a[0], fetched_);
    decode_.template decode<1>(a[1], fetched_);
    if constexpr (kByHalves) return;
    decode_.fetch_last(fetched_);
    decode_.template decode<2>(a[2], fetched_);
    decode_.template decode<3>(a[3], fetched_);
  }

  // A tile begins with a group of scales of its own.
  __device__ __forceinline__ void begin_tile(Operand& a) {
    scales_ = 0;
    begin_part<false>(a);
  }

  // The rows of x of the part that was decoded last; `second` of two halves.
  __device__ __forceinline__ uint64_t rows_of(bool second) const {
    const bool lower = Map::kHalves == 2 && second;
    return rows_start_ + slot_ * (Map::kRowBytes / 16) + (lower ? Map::kHalfBytes / 16 : 0);
  }

  template <int kN, int kFirst, int kEnd>
  __device__ __forceinline__ void add_steps(float (&sum)[kN / 2], const Operand& a, uint64_t b) {
    using namespace sm90;
    products_begin();
    by_least<kN>([&](auto width) {
#pragma unroll
      for (int step = kFirst; step < kEnd; ++step) {
        add<width>(sum, a[step], b + descriptor_offset<false>(0, step));
      }
      if constexpr (kCommitsInside) products_commit();
    });
    if constexpr (!kCommitsInside) products_commit();
  }

  template <int kN, int kAll>
  static __device__ __forceinline__ void add(float (&sum)[kAll], const uint32_t (&a)[4],
                                             uint64_t b) {
    sm90::DecodedProduct<kN>::add(reinterpret_cast<float (&)[kN / 2]>(sum), a, b);
  }

  // By the narrowest instruction that holds the tile's rows, but for the tallest tiles: a branch
  // inside of the loop, as loops with sums of their own do not fit into the registers (ptxas
  // serialises the products).
  template <int kN, typename Work>
  __device__ __forceinline__ void by_least(const Work& work) const {
    if constexpr (kBranches) {
      first_width<Widths>(rows_, work);
    } else {
      work(std::integral_constant<int, kN>{});
    }
  }

  // When all products but the group handed on last have ended, the operand of the part before is
  // free, and so is its stage if it was the last. A tile's first part has none before it.
  __device__ __forceinline__ void free_part_before(bool holds) {
    sm90::products_wait<1>();
    if (holds) release(before_);
    before_ = slot_;
  }

  // What the left operand of the next part is decoded from, of the stage that the ring has come to
  // or, the second of a pair, of the last one; kOdd: whether the part's number in its tile is odd.
  template <bool kOdd>
  __device__ __forceinline__ void fetch(Fetched& fetched) {
    constexpr bool kSecond = Map::kParts == 2 && kOdd;
    if constexpr (!kSecond) {
      sm90::barrier_wait(at_.full(ring_.slot), ring_.parity, "a full stage");
      see_copies();
      slot_ = ring_.slot;
      ring_.advance();
    }
    const uint32_t packed = at_.packed(slot_, kBoxes == 2 && kSecond);
    if constexpr (kGrouped<kAlong, kFormat>) {
      decode_.template fetch<kOdd>(fetched, packed, next_of_group());
    } else {
      decode_.template fetch<kOdd>(fetched, packed, at_.scales(slot_, kSecond));
    }
  }

  // Where the next part's scales lie in its group.
  __device__ __forceinline__ uint32_t next_of_group() {
    if (scales_ % (4 * kGroupParts) == 0) {
      scales_ = at_.scales(group_, 0);
      group_ = group_ + 1 == Map::kStages ? 0 : group_ + 1;
    }
    const uint32_t found = scales_;
    scales_ += 4;
    return found;
  }

  // Ranks [16 s, 16 s + 16) of a thread's two columns: two ranks each, and two further by 8. Where
  // registers allow, the first are asked for when the tile begins; they come straight from global
  // memory.
  class Factor {
   public:
    __device__ __forceinline__ Factor(const Arguments& p, const TileAt& where, int column) : p_(p) {
      from_ = p.factor + where.expert * p.factor_expert + column * p.factor_column;
      inside_ = column < p.columns;
    }
    __device__ __forceinline__ void load_first() { load(first_, 0); }
    __device__ __forceinline__ void operator()(uint32_t (&a)[4], int k) const {
      uint32_t found[8];
      load(found, k);
      pack(a, found);
    }
    __device__ __forceinline__ void first(uint32_t (&a)[4]) const { pack(a, first_); }

   private:
    __device__ __forceinline__ void load(uint32_t (&found)[8], int k) const {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // half of the ranks, column, rank
        const int rank = k + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        found[i] = 0;
        if (rank < p_.rank && inside_) {
          found[i] = *reinterpret_cast<const uint16_t*>(from_ + i / 2 % 2 * p_.factor_column +
                                                        rank * p_.factor_rank);
        }
      }
    }
    static __device__ __forceinline__ void pack(uint32_t (&a)[4], const uint32_t (&found)[8]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = found[2 * i] | found[2 * i + 1] << 16;
    }

    const Arguments& p_;
    const char* from_;
    bool inside_;
    uint32_t first_[8];
  };

  // sum += F low^T, 64 of the rank at a time, or 16 where there are no more.
  template <int kN>
  __device__ __forceinline__ void add_low_rank(float (&sum)[kN / 2], const Factor& factor,
                                               Ring<Map::kStages>& ring) {
    using namespace sm90;
    for (int k = 0; k < p_.rank; k += kDepth) {
      uint32_t a[kSteps][4];
      if (k == 0 && kLoadsEarly) {
        factor.first(a[0]);
      } else {
        factor(a[0], k);
      }
      const bool few = p_.rank - k <= kInstructionDepth;
      if (!few) {
#pragma unroll
        for (int step = 1; step < kSteps; ++step) factor(a[step], k + step * kInstructionDepth);
      }
      barrier_wait(at_.full(ring.slot), ring.parity, "a full stage of the rank");
      see_copies();
      const uint64_t b = rows_start_ + ring.slot * (Map::kRowBytes / 16);
      products_begin();
      by_least<kN>([&](auto width) {
        add<width>(sum, a[0], b + descriptor_offset<false>(0, 0));
        if (few) return;
#pragma unroll
        for (int step = 1; step < kSteps; ++step) {
          add<width>(sum, a[step], b + descriptor_offset<false>(0, step));
        }
      });
      products_commit();
      products_wait<0>();
      release(before_);
      before_ = ring.slot;
      ring.advance();
    }
  }

  // Of a wide tile, whose sums leave no registers for more than 16 of the rank.
  template <int kN>
  __device__ __forceinline__ void add_low_rank(Sums<kN>& sum, const Factor& first,
                                               const Factor& second, Ring<Map::kStages>& ring) {
    using namespace sm90;
    for (int k = 0; k < p_.rank; k += kDepth) {
      uint32_t a[4], b[4];
      first(a, k);
      second(b, k);
      barrier_wait(at_.full(ring.slot), ring.parity, "a full stage of the rank");
      see_copies();
      uint64_t rows = rows_start_ + ring.slot * (Map::kRowBytes / 16);
      add_rank_step<kN>(sum, a, b, rows);
      const int end = min(p_.rank, k + kDepth);
      for (int at = k + kInstructionDepth; at < end; at += kInstructionDepth) {
        first(a, at);
        second(b, at);
        rows += descriptor_offset<false>(0, 1);
        add_rank_step<kN>(sum, a, b, rows);
      }
      release(before_);
      before_ = ring.slot;
      ring.advance();
    }
  }

  template <int kN>
  static __device__ __forceinline__ void add_rank_step(Sums<kN>& sum, const uint32_t (&a)[4],
                                                       const uint32_t (&b)[4], uint64_t rows) {
    sm90::products_begin();
    sm90::DecodedProduct<kN>::add(sum[0], a, rows);
    sm90::DecodedProduct<kN>::add(sum[1], b, rows);
    sm90::products_commit();
    sm90::products_wait<0>();
  }

  // wgmma reads through the async proxy what cp.async has written through the generic one: hence
  // the fence, behind the barrier.
  static __device__ __forceinline__ void see_copies() { sm90::fence_for_copies(); }

  // This warp is done with a stage.
  __device__ __forceinline__ void release(uint32_t slot) const {
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(at_.empty(slot));
    __syncwarp();
  }

  const Arguments& p_;
  const Map& at_;
  const int consumer_;
  const int stages_;
  const int rank_stages_;
  const uint64_t rows_start_;
  const Source decode_;
  Ring<Map::kStages> ring_;  // the next stage to be decoded
  int rows_ = 0;             // of the tile
  uint32_t slot_ = 0;        // of the stage that was decoded last
  uint32_t before_ = 0;      // of the stage that was multiplied last
  uint32_t scales_ = 0;      // where the next part's lie, if its group goes on
  int group_ = 0;            // the next one's place
  Operand even_, odd_;       // decoded parts, in turns; a tile begins with even_
  Fetched fetched_;          // of the part that was begun by its first half
};

// Of an expert's tiles, in steps of instructions; 0 is the tallest, the last has no rows.
template <typename Map>
__device__ __forceinline__ int height_class(const int* offsets, int expert) {
  const int rows = offsets[expert + 1] - offsets[expert];
  const int height = rows == 0 ? 0 : row_range(rows, row_tiles(rows, Map::kTokens), 0).count;
  return (Map::kTokens - height) / kHeightStep;
}

// Over the lanes of a warp before this one.
__device__ __forceinline__ int sum_before(int own) {
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 >= distance) sum += left;
  }
  return sum - own;
}

// By one warp: experts in the order of their classes, and of their numbers inside of one, so that
// all blocks agree. `places` holds how many every class has.
template <typename Map>
__device__ __forceinline__ void make_order(const int* offsets, int experts, int* places,
                                           int* order) {
  const int lane = static_cast<int>(threadIdx.x);
  places[lane] = sum_before(places[lane]);
  __syncwarp();
  for (int first = 0; first < experts; first += 32) {
    const int e = first + lane;
    const int own =
        e < experts ? height_class<Map>(offsets, e) : Map::kHeightClasses;  // or nobody's
    const uint32_t peers = __match_any_sync(0xffffffff, own);
    const int place = places[own] + __popc(peers & ((1u << lane) - 1));
    if (e < experts) order[place] = e;
    __syncwarp();
    if (peers >> lane == 1) places[own] = place + 1;  // the last of its class
    __syncwarp();
  }
}

// Offsets; experts in the order of their tiles' heights; tiles of rows before every expert of this
// order.
template <typename Map>
__device__ __forceinline__ void make_tables(const Arguments& p, const Map& at) {
  int *offsets = at.offsets(), *starts = at.starts(), *order = at.order();
  int* places = at.sources(0);  // nobody's yet
  static_assert(Map::kHeightClasses < 32);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) places[thread] = 0;
  for (int e = thread; e <= p.experts; e += Map::kThreads)
    offsets[e] = static_cast<int>(p.offsets[e]);
  __syncthreads();
  for (int e = thread; e < p.experts; e += Map::kThreads) {
    atomicAdd(places + height_class<Map>(offsets, e), 1);
  }
  __syncthreads();
  if (thread >= 32) return;
  make_order<Map>(offsets, p.experts, places, order);
  int before = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int i = first + thread;
    const int e = i < p.experts ? order[i] : 0;
    const int own = i < p.experts ? row_tiles(offsets[e + 1] - offsets[e], Map::kTokens) : 0;
    const int sum = sum_before(own);
    if (i < p.experts) starts[i] = before + sum;
    before += __shfl_sync(0xffffffff, sum + own, 31);
  }
  if (thread == 0) starts[p.experts] = before;
}

template <bool kAlong, Format kFormat, bool kActivates, Rows kRows>
__global__ void __launch_bounds__((TileShape<kAlong, kFormat, kRows>::kThreads),
                                  (TileShape<kAlong, kFormat, kRows>::kBlocks))
    nf4_product_kernel(const __grid_constant__ Arguments p) {
  using namespace sm90;
  extern __shared__ char shared[];
  using Map = SharedMap<kAlong, kFormat, kRows>;
  const Map at(shared);
  if (threadIdx.x == 0) {
    prefetch_map(p.packed);
    for (int slot = 0; slot < Map::kStages; ++slot) {
      barrier_init(at.full(slot), kWriters);
      barrier_init(at.empty(slot), Map::kReaders);
    }
    barrier_init_fence();
    fence_for_copies();
  }
  make_tables(p, at);
  wait_for_kernel_before();
  let_next_kernel_begin();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    give_registers<Map::kLoaderRegisters>();
    Loader<kAlong, kFormat, kRows>(p, at).run();
  } else {
    take_registers<Map::kConsumerRegisters>();
    Consumer<kAlong, kFormat, kActivates, kRows>(p, at, warpgroup - 1).run();
  }
}

}  // namespace optimizer::nf4_product
