"""Two or more builds of octavo-native on one GPU, in turns: their quantizers' bits, then their times beside a copy's.

    pip install --target OLD octavo_native-OLD.whl nanobind-backend && pip install --target NEW ...
    python benchmarks/builds/compare_quantizers.py OLD NEW --output benchmarks/results/quantize-turns-MACHINE-DATE.json

Each build lives in a process of its own (turns.py). Bits are compared whole, what is not written included: of every
scaling, plane, layout and dtype, on ragged sizes with empty groups and a tail, on matrices and through an index, with
values of every size, zeros, subnormals, infinities and NaN; and of every result that is timed. A copy moves the bytes
that a call reads and writes (an amax pass reads the input once more), half of them read and half written.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from quantizer_cases import LINEAR, NATIVE, SPECS, bytes_of, judged, timed
from turns import Build, digest, digests_of, finish, in_turns, options_of, serve

POISON = 0xA5

# ---- in the process of one build


def _values(shape: tuple[int, int], case: dict[str, Any]) -> Any:
    """Of the case's kind, rows `gap` elements further apart than they are long."""
    import torch

    rows, cols = shape
    dtype = getattr(torch, case["dtype"])
    kind = case["values"]
    count = rows * cols
    if kind == "every":  # bits
        word = torch.int32 if dtype == torch.float32 else torch.int16
        high = 1 << 8 * dtype.itemsize
        bits = torch.randint(0, high, (count,), dtype=torch.int64, device="cuda").sort().values
        bits = torch.where(bits >= high // 2, bits - high, bits).to(word)
        x = bits.view(dtype).float()
        x = torch.where(torch.isfinite(x), x, 0.0)
    else:
        x = torch.randn(count, device="cuda")
    if kind == "exponents":
        x = x * torch.exp2(torch.randint(-30, 12, (count,), device="cuda").float())
    elif kind == "zeros":
        x = x * (torch.rand(count, device="cuda") < 0.05) * torch.where(torch.rand(count, device="cuda") < 0.5, -1, 1)
    elif kind == "special":
        x[torch.rand(count, device="cuda") < 0.0005] = float("nan")
        x[torch.rand(count, device="cuda") < 0.0005] = float("-inf")
    elif kind == "small":
        x = x * 1e-38 if dtype != torch.float16 else x * 1e-6
    elif kind == "huge":
        x = x * (8e37 if dtype != torch.float16 else 2e4)
    out = torch.full((rows, cols + case["gap"]), float("nan"), dtype=dtype, device="cuda")
    out[:, :cols] = x.reshape(rows, cols).to(dtype)
    return out[:, :cols]


class Call:
    """One quantizer with its operands on the device."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        import octavo_native as native
        from octavo_native import layouts

        torch.manual_seed(17)
        spec, matrix_rows, sizes = SPECS[case["spec"]], case["matrix_rows"], case["sizes"]
        groups = len(sizes)
        good = sum(size for size in sizes if 0 < size < 1 << 20)
        rows = groups * matrix_rows if matrix_rows else good + case["tail"]
        flags = {name: spec[name] for name in ("square", "stochastic", "hadamard", "power_of_two") if name in spec}
        self.quantizer = native.Quantizer(
            format=native.FORMATS[spec["format"]],
            scaling=native.SCALINGS[spec["scaling"]],
            operand=native.OPERANDS[spec.get("operand", "x")],
            **flags,
        )
        prologue, extras = case["prologue"], case["extras"]
        gated, gradient = "swiglu" in prologue, "dswiglu" in prologue
        cols = case["cols"] // 2 if gated and not gradient else case["cols"]  # of what is quantized
        each = 0 if prologue else case["each"]
        count = -(-rows // each) if each else 0
        x = _values((count or rows, case["cols"]), case)
        held: dict[str, Any] = {"x": x, "seed": torch.tensor([0x1234_5678_9ABC], dtype=torch.int64, device="cuda")}
        held["encode"] = torch.exp2(torch.arange(groups, device="cuda") % 5 - 2.0)
        held["plan"] = torch.zeros(native.plan_words(rows, groups), dtype=torch.int64, device="cuda")
        held["sizes"] = torch.tensor(sizes, dtype=torch.int64, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        if not matrix_rows:
            native.plan(
                cuda=True,
                sizes=held["sizes"].data_ptr(),
                sizes_are_64=True,
                groups=groups,
                rows=rows,
                plan=held["plan"].data_ptr(),
                stream=stream,
            )
        if each:
            held["index"] = torch.randint(-1, count * each, (rows,), device="cuda")
        self.out: dict[str, Any] = {}

        def poisoned(name: str, shape: tuple[int, ...], width: int) -> int:
            size = width
            for side in shape:
                size *= side
            self.out[name] = torch.full((size,), POISON, dtype=torch.uint8, device="cuda")
            return int(self.out[name].data_ptr()) if size else 0

        planes = {}
        for way in case["planes"]:
            sides: dict[str, Any] = {
                "format": spec["format"],
                "scaling": spec["scaling"],
                "square": spec.get("square", False),
                "hadamard": spec.get("hadamard", False),
                "layout": NATIVE[way] if case["native"] else "plain",
                "direction": way,
                "rows": rows,
                "cols": cols,
                "groups": groups,
                "matrix_rows": matrix_rows,
            }
            width = 1 if spec["scaling"] in ("nvfp4", "mxfp8") else 4
            planes[way] = native.PlaneArgs(
                codes=poisoned(f"{way} codes", layouts.codes_shape(**sides), 1),
                scales=poisoned(f"{way} scales", layouts.scales_shape(**sides), width),
                global_=poisoned(f"{way} global", (groups,), 4) if spec["scaling"] == "nvfp4" else 0,
                layout=int(case["native"]),
            )
        more: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if "amax" in extras:
            more["amax"] = poisoned("amax", (groups,), 4)
        if "dequantized" in extras:
            more["dequantized"] = poisoned("dequantized", (rows, cols), 2)
        if "dbias" in extras:
            more["dbias"] = poisoned("dbias", (groups, cols), 4)
        if prologue:
            arrays: dict[str, Any] = {}
            if prologue == "rms":
                held["gamma"] = torch.randn(cols, device="cuda").to(x.dtype)
                arrays = {"norm": native.NORMS["rms"], "gamma": held["gamma"].data_ptr(), "epsilon": 1e-6}
                arrays["rstd"] = poisoned("rstd", (rows,), 4)
                kind = "norm"
            else:
                name = prologue.replace("dswiglu", "swiglu")
                arrays = {"activation": native.ACTIVATIONS[name]}
                kind = "activation_grad" if gradient else "activation"
                if gradient:
                    held["dy"] = _values((rows, cols // 2), {**case, "gap": 0, "values": "normal"})
                    arrays |= {"dy": held["dy"].data_ptr(), "dy_stride": held["dy"].stride(0)}
                if "probs" in extras:
                    held["probs"] = torch.rand(rows, device="cuda")
                    arrays["probs"] = held["probs"].data_ptr()
                    if gradient:
                        arrays["dprobs"] = poisoned("dprobs", (rows,), 4)
            more["prologue"] = native.PrologueArgs(kind=native.PROLOGUES[kind], **arrays)
            options = {
                "prologue": native.PROLOGUES[kind],
                **{k: arrays[k] for k in ("activation", "norm") if k in arrays},
            }
            options["dprobs"] = "dprobs" in arrays
        needed = self.quantizer.workspace_bytes(
            cuda=True,
            dtype=native.DTYPES[case["dtype"]],
            rows=rows,
            cols=case["cols"],
            groups=groups,
            matrix_rows=matrix_rows,
            rowwise="rowwise" in planes,
            columnwise="columnwise" in planes,
            amax="amax" in extras,
            dbias="dbias" in extras,
            count=count,
            **options,
        )
        held["workspace"] = torch.empty(needed, dtype=torch.uint8, device="cuda")
        read = native.InputArgs(
            x=x.data_ptr() if x.numel() else 0,
            dtype=native.DTYPES[case["dtype"]],
            rows=rows,
            cols=case["cols"],
            row_stride=x.stride(0),
            groups=groups,
            matrix_rows=matrix_rows,
            plan=0 if matrix_rows else held["plan"].data_ptr(),
            index=held["index"].data_ptr() if each else 0,
            each=each or 1,
            count=count,
        )
        self.held = held
        self.arguments = {
            "cuda": True,
            "input": read,
            **planes,
            **more,
            "encode_scales": held["encode"].data_ptr() if spec["scaling"] == "delayed" else 0,
            "seed": held["seed"].data_ptr() if spec.get("stochastic") else 0,
            "workspace": held["workspace"].data_ptr() if needed else 0,
            "workspace_bytes": needed,
            "stream": stream,
        }

    def run(self) -> None:
        """Queue one call."""
        self.quantizer.run(**self.arguments)

    def digest(self) -> list[int]:
        """Of all outputs."""
        return [number for array in self.out.values() for number in digest(array)]


class Copy:
    """A copy that reads and writes this many bytes in all."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        self.from_ = torch.zeros(case["copy"] // 2, dtype=torch.uint8, device="cuda")
        self.to = torch.empty_like(self.from_)

    def run(self) -> None:
        """Queue it."""
        self.to.copy_(self.from_)

    def digest(self) -> list[int]:
        """Nothing that differs."""
        return []


# ---- in the parent


def compare(builds: list[Build], case: dict[str, Any], turns: int, batch_us: float) -> dict[str, Any]:
    """One row: whether bits are equal, medians in microseconds beside a copy's, and times over the first build's."""
    moved = bytes_of(case)
    digests_of(builds, [{"copy": moved}] * len(builds))
    copy = min(in_turns(builds, 3, batch_us)["us"])
    digests = digests_of(builds, [case] * len(builds))
    row = {
        **{name: case[name] for name in ("kind", "shape")},
        "groups": "matrices" if case["matrix_rows"] else "even" if len(set(case["sizes"])) == 1 else "every other",
        "equal_bits": all(isinstance(one, list) and one == digests[0] for one in digests),
        "bytes": moved,
        "copy_us": copy,
        **in_turns(builds, turns, batch_us),
    }
    row["of_copy"] = [round(copy / us, 3) for us in row["us"]]
    return row


def main() -> int:
    """The command; `--help` says what it takes. 1 where bits differ."""
    parser = options_of(__doc__, list(LINEAR), batch_ms=15.0)
    parser.add_argument("--kinds", default="w,x,dy,plain,row,dswiglu block,dswiglu delayed", help="by commas")
    parser.add_argument("--skewed", action="store_true", help="every other group empty")
    parser.add_argument("--bits", default=",".join(SPECS), help="quantizers whose bits are compared, by commas")
    options = parser.parse_args()
    if options.serve:
        serve(lambda case: Copy(case) if "copy" in case else Call(case))
        return 0
    if not options.builds:
        parser.error("give the folders of two builds")
    builds = [Build(folder, __file__) for folder in options.builds]
    different: list[dict[str, Any]] = []
    refused: dict[str, int] = {}
    compared = 0
    start = time.monotonic()
    for case in judged([name for name in options.bits.split(",") if name]):
        digests = digests_of(builds, [case] * len(builds))
        if any(one != digests[0] for one in digests):
            different.append(case)
            print(f"other bits: {case}: {digests}", flush=True)
        elif isinstance(digests[0], list):
            compared += 1
        else:
            refused[digests[0]] = refused.get(digests[0], 0) + 1
    print(f"{compared} results compared in {time.monotonic() - start:.1f} s, {len(different)} differ", flush=True)
    for reason, count in refused.items():
        print(f"refused by all, {count} times: {reason}", flush=True)
    rows = []
    for case in timed(options.shapes.split(","), [k for k in options.kinds.split(",") if k], options.skewed):
        row = compare(builds, case, options.turns, 1e3 * options.batch_ms)
        rows.append(row)
        numbers = "  ".join(f"{us:8.1f} ({share:.2f})" for us, share in zip(row["us"], row["of_copy"], strict=True))
        bits = "" if row["equal_bits"] else "   OTHER BITS"
        print(f"{row['shape']:17} {row['kind']:16} copy {row['copy_us']:7.1f}  {numbers}{bits}", flush=True)
    return finish(options, {"compared": compared, "different": different, "refused": refused}, rows)


if __name__ == "__main__":
    sys.exit(main())
