// Launches that are made at once, or recorded into a sequence that replays them with other arrays each time.
#pragma once

#include <map>
#include <variant>
#include <vector>

#include "arguments.h"
#include "octavo/delayed.h"
#include "octavo/dequantize.h"
#include "octavo/gemm.h"
#include "octavo/permute.h"
#include "octavo/plan.h"
#include "octavo/quantize.h"

namespace octavo::bindings {

// A recorded launch names an array by its number among those of `Sequence::run`, from 1 on, in the bits above
// PLACE_BITS, and the byte offset into it below. User-space addresses are below 2^48, so the two cannot be confused.
constexpr int PLACE_BITS = 48;

// The two launches that have the same arguments.
struct PermuteRows {
  MoveArgs args;
};
struct CombineRows {
  MoveArgs args;
};

using Launch = std::variant<PlanArgs, QuantizeArgs, GemmArgs, RecordArgs, RouteArgs, PermuteRows, CombineRows, DotArgs,
                            DequantizeArgs>;

inline Error on_cpu(const PlanArgs& args, int) { return plan_cpu(args); }
inline Error on_cpu(const QuantizeArgs& args, int threads) { return quantize_cpu(args, threads); }
inline Error on_cpu(const GemmArgs& args, int threads) { return gemm_cpu(args, threads); }
inline Error on_cpu(const RecordArgs& args, int) { return record_cpu(args); }
inline Error on_cpu(const RouteArgs& args, int) { return route_cpu(args); }
inline Error on_cpu(const PermuteRows& launch, int threads) { return permute_cpu(launch.args, threads); }
inline Error on_cpu(const CombineRows& launch, int threads) { return combine_cpu(launch.args, threads); }
inline Error on_cpu(const DotArgs& args, int threads) { return dot_cpu(args, threads); }
inline Error on_cpu(const DequantizeArgs& args, int threads) { return dequantize_cpu(args, threads); }

inline Error on_cuda(const PlanArgs& args, void* stream) { return plan_cuda(args, stream); }
inline Error on_cuda(const QuantizeArgs& args, void* stream) { return quantize_cuda(args, stream); }
inline Error on_cuda(const GemmArgs& args, void* stream) { return gemm_cuda(args, stream); }
inline Error on_cuda(const RecordArgs& args, void* stream) { return record_cuda(args, stream); }
inline Error on_cuda(const RouteArgs& args, void* stream) { return route_cuda(args, stream); }
inline Error on_cuda(const PermuteRows& launch, void* stream) { return permute_cuda(launch.args, stream); }
inline Error on_cuda(const CombineRows& launch, void* stream) { return combine_cuda(launch.args, stream); }
inline Error on_cuda(const DotArgs& args, void* stream) { return dot_cuda(args, stream); }
inline Error on_cuda(const DequantizeArgs& args, void* stream) { return dequantize_cuda(args, stream); }

class Sequence {
 public:
  explicit Sequence(bool cuda) : cuda_(cuda) {}

  // Gives the next number to the array of these bytes: launches that are added later may have addresses in it for
  // places. Returns the number. Arrays that share bytes with it are gone, if it `replaces` them; else a ValueError.
  uint64_t name(Address start, uint64_t bytes, bool replaces);

  // Appends a launch whose arrays are places, or in arrays that `name` was told of. ValueError for another device, and
  // for other addresses.
  void add(bool cuda, Launch launch);

  // Makes the launches from number `first` to before number `end`, in order, on `arrays`; a null one is a null array of
  // the launches.
  void run(const std::vector<Address>& arrays, Address stream, int threads, size_t first, size_t end) const;

  // The numbers of each launch's arrays.
  std::vector<std::vector<uint64_t>> arrays() const;

  size_t size() const { return launches_.size(); }

 private:
  struct Named {
    uint64_t end, number;
  };

  bool cuda_;
  uint64_t arrays_ = 0;
  std::map<Address, Named> named_;  // by the first byte
  std::vector<Launch> launches_;
};

template <typename Args>
void launch_or_record(Sequence* into, bool cuda, const Args& args, Address stream, int threads) {
  if (into != nullptr) return into->add(cuda, args);
  launch(cuda, [&] { return on_cpu(args, threads); }, [&] { return on_cuda(args, cuda_stream(stream)); });
}

}  // namespace octavo::bindings
