"""What a torch backend in a package of its own may import from Octavo's front end, all of it here.

Everything else of `octavo_torch`, except its public names, may move in any release. `octavo_registry` is the other half
of a backend: cards, hooks, requests and the calls of the bound functions.

Values

    GroupedTensor        codes and decode scales of one operand; what quantizers return and GEMMs take
    PLANES               the names of its planes, in the order of its fields
    DelayedState         the amax history and scales of delayed scaling
    OPERANDS             the operands in the order of a DelayedState's rows: "x", "w", "dy"
    Extras               what a fused quantizer returns beside codes and scales
    QuantizedWeight      a weight's codes with the weight that they were made of; quantize_weight makes them
    RecipeModule         the base of GroupedLinear, Linear, GroupedMLP and MoE; update_scales ends a step of a model's

Dtypes

    DTYPES               the torch dtype of each high-precision dtype that a request can name
    DTYPE_NAMES          the name of each of these torch dtypes
    PAYLOAD_DTYPE        the torch dtype of codes, by their format; E2M1 codes are uint8
    SCALE_DTYPE          the torch dtype of decode scales, by their format
    dtype_text           a dtype as error messages print it: "bfloat16" without torch's prefix

Tensors

    is_plain             False for a tensor that stands for another one: a compiler's, or a wrapper subclass
    ZeroGradient         zeros that stand for a gradient, without memory before they are written
    leaves_of            the parameters of one weight, which may be one tensor or one per group
    row_strides          the strides of rows and matrices, where a tensor can be written row by row
    seed_tensor          a seed as a 0-dimensional int64 tensor on a device
    group_amax           max |x| of each group, in plain torch operations

Specs in operators, whose schemas take text

    quantizer_text       a QuantizerSpec as JSON, computed once per object
    quantizer_from       the QuantizerSpec of that JSON
    plain_layout         the GroupedTensorSpec of a plain tensor, from that JSON, a shape and the number of groups

Memory of what was computed before

    Bounded              a dictionary that is emptied before it would exceed 1024 entries

Operators and CUDA graphs

    Operators            defines custom operators of a namespace, which eager calls pass by
    MOVE_OPERATORS       schemas and fake kernels of the operators that route and move rows
    CHOOSE_OPERATORS     of those of a router
    rule_text            a router's rule as JSON, which they take, computed once per rule
    rule_from            the rule of that JSON
    status_word          the int32 [1] word of a device in which kernels set flags
    check_not_captured   raises GraphUnsafeError where a value in host memory would be captured
    is_capturing         whether the current stream is being captured
    graph_safe           a block in which only plans that a graph may hold are made and used
    explained_waits      a block in which a wait for the device raises GraphUnsafeError
    record_graph         captures a function into a CUDA graph after warm-up runs
    capture_on           captures a function that has been warmed up, on a stream of the caller's
    WARMUP               the number of those runs unless the caller says otherwise
    GraphUnsafeError     the error of a function that cannot be captured
"""

from __future__ import annotations

from octavo_torch.arithmetic.operators import group_amax_of as group_amax
from octavo_torch.arithmetic.operators import layout_from as plain_layout
from octavo_torch.arithmetic.operators import quantizer_from, quantizer_text
from octavo_torch.arrays.dtypes import DTYPE_NAMES, DTYPES, PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_torch.arrays.dtypes import name_of as dtype_text
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.arrays.strides import row_strides
from octavo_torch.arrays.zero_gradient import ZeroGradient
from octavo_torch.compiler.graphs import (
    WARMUP,
    GraphUnsafeError,
    capture_on,
    check_not_captured,
    explained_waits,
    graph_safe,
    is_capturing,
)
from octavo_torch.compiler.graphs import record as record_graph
from octavo_torch.compiler.operators import Operators
from octavo_torch.compiler.status import status_word
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.quantize_weight import quantize_weight
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.memo import Bounded
from octavo_torch.moe.rows.operators import CHOOSE_OPERATORS, MOVE_OPERATORS, rule_from, rule_text
from octavo_torch.quantizers.extras import Extras
from octavo_torch.scaling.delayed_state import OPERANDS, DelayedState
from octavo_torch.scaling.recipe_module import RecipeModule, update_scales
from octavo_torch.scaling.seeds import seed_tensor

__all__ = [
    "CHOOSE_OPERATORS",
    "DTYPES",
    "DTYPE_NAMES",
    "MOVE_OPERATORS",
    "OPERANDS",
    "PAYLOAD_DTYPE",
    "PLANES",
    "SCALE_DTYPE",
    "WARMUP",
    "Bounded",
    "DelayedState",
    "Extras",
    "GraphUnsafeError",
    "GroupedTensor",
    "Operators",
    "QuantizedWeight",
    "RecipeModule",
    "ZeroGradient",
    "capture_on",
    "check_not_captured",
    "dtype_text",
    "explained_waits",
    "graph_safe",
    "group_amax",
    "is_capturing",
    "is_plain",
    "leaves_of",
    "plain_layout",
    "quantize_weight",
    "quantizer_from",
    "quantizer_text",
    "record_graph",
    "row_strides",
    "rule_from",
    "rule_text",
    "seed_tensor",
    "status_word",
    "update_scales",
]
