// The epilogue of a tile: scales that apply to whole dot products, bias, one rounding, stores.
//
// bf16 results are staged in smem and stored by TMA while the next tile's mainloop runs (staged_store.cuh); so are fp32
// sums that are added to the result, by a bulk reduction or by what addends.cuh has. Everything else is stored straight
// from registers (register_store.cuh).
//
// A tile's epilogue is straight-line code that runs once, and an instruction-cache miss costs more than the work
// itself: each variant is compiled separately, and the common ones are short.
#pragma once

#include "addends.cuh"
#include "factors.cuh"
#include "mainloop.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "register_store.cuh"
#include "schedule.cuh"
#include "staged_store.cuh"

namespace octavo::cuda {

// The epilogue of one tile: picks the compiled variant that the launch asks for.
template <class Config>
struct GemmEpilogue {
  const GemmParams& params;
  const GemmTileAt& tile;
  const GemmMainloop<Config>& mainloop;
  const GemmFactors<Config>& factors;
  GemmPipeline<Config>& pipeline;

  template <Finish F, DType D>
  __device__ __forceinline__ void store(typename GemmMainloop<Config>::Sums& sums) const {
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
      GemmStore(params, tile, mainloop.row(), mainloop.col(part))
          .template store<F, D>(sums[part], factors.upper(), factors.lower(), pipeline.columns() + mainloop.col(part));
    }
  }

  template <Finish F>
  __device__ __forceinline__ void store_bf16(typename GemmMainloop<Config>::Sums& sums) const {
    if constexpr (Config::OUT_TILES == 0) {
      store<F, DType::bf16>(sums);
    } else {
      stage_tiles<Config, F>(params, tile, factors, pipeline, sums);
    }
  }

  __device__ __forceinline__ void add(typename GemmMainloop<Config>::Sums& sums) const {
    if constexpr (Config::STAGED) {
      reduce_add_rows<Config>(params, tile, mainloop.row(), factors.upper(), factors.lower(), pipeline, sums[0]);
    } else if constexpr (Config::ADDS_IN_PLACE) {
      Addends<Config>::add(factors, pipeline, sums);
    } else {
      store<Finish::adds, DType::f32>(sums);
    }
  }

  __device__ __forceinline__ void run(typename GemmMainloop<Config>::Sums& sums) const {
    const bool bf16 = params.out_dtype == DType::bf16, f32 = params.out_dtype == DType::f32;
    if (params.finish == Finish::plain && bf16) {
      store_bf16<Finish::plain>(sums);
    } else if (Config::COLUMNS && params.finish == Finish::columns && bf16) {
      if constexpr (Config::COLUMNS) store_bf16<Finish::columns>(sums);
    } else if (Config::ADDS && params.finish == Finish::adds) {
      if constexpr (Config::ADDS) add(sums);
    } else if (params.finish == Finish::plain && f32) {
      store<Finish::plain, DType::f32>(sums);
    } else if (f32) {
      store<Finish::general, DType::f32>(sums);
    } else {
      store<Finish::general, DType::bf16>(sums);
    }
  }
};

}  // namespace octavo::cuda
