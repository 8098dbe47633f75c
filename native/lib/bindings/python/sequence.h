// Launches that are made at once, or recorded into a sequence that replays them with other arrays each time.
#pragma once

#include <variant>
#include <vector>

#include "arguments.h"
#include "octavo/delayed.h"
#include "octavo/gemm.h"
#include "octavo/plan.h"
#include "octavo/quantize.h"

namespace octavo::bindings {

// A recorded launch names an array by its number among those of `Sequence::run`, from 1 on, in the bits above
// PLACE_BITS, and the byte offset into it below. User-space addresses are below 2^48, so the two cannot be confused.
constexpr int PLACE_BITS = 48;

using Launch = std::variant<PlanArgs, QuantizeArgs, GemmArgs, RecordArgs>;

inline Error on_cpu(const PlanArgs& args, int) { return plan_cpu(args); }
inline Error on_cpu(const QuantizeArgs& args, int threads) { return quantize_cpu(args, threads); }
inline Error on_cpu(const GemmArgs& args, int threads) { return gemm_cpu(args, threads); }
inline Error on_cpu(const RecordArgs& args, int) { return record_cpu(args); }

inline Error on_cuda(const PlanArgs& args, void* stream) { return plan_cuda(args, stream); }
inline Error on_cuda(const QuantizeArgs& args, void* stream) { return quantize_cuda(args, stream); }
inline Error on_cuda(const GemmArgs& args, void* stream) { return gemm_cuda(args, stream); }
inline Error on_cuda(const RecordArgs& args, void* stream) { return record_cuda(args, stream); }

class Sequence {
 public:
  explicit Sequence(bool cuda) : cuda_(cuda) {}

  // Appends a launch whose arrays are places. ValueError for another device, and for addresses.
  void add(bool cuda, Launch launch);

  // Makes every launch in order on `arrays`; a null one is a null array of the launches.
  void run(const std::vector<Address>& arrays, Address stream, int threads) const;

  size_t size() const { return launches_.size(); }

 private:
  bool cuda_;
  uint64_t arrays_ = 0;
  std::vector<Launch> launches_;
};

template <typename Args>
void launch_or_record(Sequence* into, bool cuda, const Args& args, Address stream, int threads) {
  if (into != nullptr) return into->add(cuda, args);
  launch(cuda, [&] { return on_cpu(args, threads); }, [&] { return on_cuda(args, cuda_stream(stream)); });
}

}  // namespace octavo::bindings
