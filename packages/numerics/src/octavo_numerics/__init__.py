"""The executable definition of Octavo's recipes, in numpy and ml_dtypes.

`quantize` and `dequantize` define every code and scale; `grouped_matmul`, `grouped_dgrad` and `grouped_wgrad` are the
products in float64, and `error_bound` says how far a backend may be from them. `tensor_stats` counts what is lost.
"""

from octavo.router import RouterRule
from octavo_numerics.arrays import PLANES, QuantizedArray
from octavo_numerics.casts import cast, decode, round_bfloat16
from octavo_numerics.delayed import DelayedState, init_delayed, record_amax, update_delayed
from octavo_numerics.dequantize import dequantize, folding_bound, plane_sizes, valid
from octavo_numerics.gemm.bound_report import BoundReport
from octavo_numerics.gemm.error_bound import ErrorBound, error_bound
from octavo_numerics.gemm.products import grouped_dgrad, grouped_matmul, grouped_wgrad
from octavo_numerics.hadamard import hadamard
from octavo_numerics.moe.activations import ActivationParts, activate, activate_gradient, activation_parts
from octavo_numerics.moe.kept import keep_rows, kept_rows_bound
from octavo_numerics.moe.partial_sums import partial_sums_bound
from octavo_numerics.moe.router import Choice, choose_experts, route_scores, router_losses
from octavo_numerics.moe.router_gradient import choice_weights_bound, choose_gradient, choose_gradient_bound
from octavo_numerics.mxfp4 import round_mxfp4
from octavo_numerics.optimizers.adamw import (
    AdamWRule,
    AdamWState,
    adamw_bound,
    adamw_step,
    bias_correction,
    init_adamw,
)
from octavo_numerics.optimizers.block_state import BlockState, block_state_bound, decode_blocks, encode_blocks
from octavo_numerics.optimizers.draws import round_stochastic, rounding_bits
from octavo_numerics.philox import philox4x32
from octavo_numerics.quantize import quantize
from octavo_numerics.stats import TensorStats, tensor_stats

__version__ = "0.2.0"

__all__ = [
    "PLANES",
    "ActivationParts",
    "AdamWRule",
    "AdamWState",
    "BlockState",
    "BoundReport",
    "Choice",
    "DelayedState",
    "ErrorBound",
    "QuantizedArray",
    "RouterRule",
    "TensorStats",
    "activate",
    "activate_gradient",
    "activation_parts",
    "adamw_bound",
    "adamw_step",
    "bias_correction",
    "block_state_bound",
    "cast",
    "choice_weights_bound",
    "choose_experts",
    "choose_gradient",
    "choose_gradient_bound",
    "decode",
    "decode_blocks",
    "dequantize",
    "encode_blocks",
    "error_bound",
    "folding_bound",
    "grouped_dgrad",
    "grouped_matmul",
    "grouped_wgrad",
    "hadamard",
    "init_adamw",
    "init_delayed",
    "keep_rows",
    "kept_rows_bound",
    "partial_sums_bound",
    "philox4x32",
    "plane_sizes",
    "quantize",
    "record_amax",
    "round_bfloat16",
    "round_mxfp4",
    "round_stochastic",
    "rounding_bits",
    "route_scores",
    "router_losses",
    "tensor_stats",
    "update_delayed",
    "valid",
]
