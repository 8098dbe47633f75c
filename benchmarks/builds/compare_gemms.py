"""Two or more builds of octavo-native on one GPU, in turns: their grouped GEMMs' bits, then their times.

    pip install --target OLD octavo_native-OLD.whl nanobind-backend && pip install --target NEW ...
    python benchmarks/builds/compare_gemms.py OLD NEW --output benchmarks/results/gemm-turns-MACHINE-DATE.json

Each build lives in a process of its own (turns.py). Bits are compared on ragged sizes with empty groups and a tail, on
every tile, and of every result that is timed.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from turns import Build, digest, digests_of, finish, in_turns, options_of, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR, SHORT_SUMS

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "f16": {"dtype": "float16"},
    "tensor": {"scaling": "current"},
    "e5m2": {"scaling": "current", "left_format": "e5m2"},
    "rare": {"scaling": "current", "right_format": "e5m2"},
    "fast": {"scaling": "current", "fast_accumulation": True},
    "row": {"scaling": "row"},
    "block": {"scaling": "block"},
    "mxfp8": {"scaling": "mxfp8"},
    "nvfp4": {"scaling": "nvfp4", "left_format": "e2m1", "right_format": "e2m1"},
}
RAGGED = {  # name: (sizes, rows past the last group, N, K)
    "ragged": ((0, 1, 17, 130, 0, 96, 300), 21, 144, 272),
    "many tiles": ((700, 0, 129, 2000, 33, 1024), 7, 1536, 2048),
    "odd sides": ((70, 0, 129, 513), 3, 272, 4240),
}
SIDES = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def timed(named: list[str], shapes: list[str], kinds: list[str], products: list[str]) -> list[dict[str, Any]]:
    """{"gemm", "kind", "out", "accumulate", "shape", "groups", "sizes", "tail", "n", "k"} each; "groups" is one of
    `named`: "even", or "drawn", where each row chooses its group at random."""
    cases = []
    for shape, groups in product(shapes, named):
        count, k, n, rows = (LINEAR | SHORT_SUMS)[shape]
        chosen = random.Random(17).choices(range(count), k=rows) if groups == "drawn" else range(rows)
        sizes = [0] * count
        for row in chosen:
            sizes[row % count] += 1
        layer = {"shape": shape, "groups": groups, "sizes": sizes, "tail": 0, "n": n, "k": k}
        for kind, called in product(kinds, products):
            gemm, _, adds = called.partition("+")
            out = "float32" if adds == "f32" else "bfloat16"
            cases.append({"gemm": gemm, "kind": kind, "out": out, "accumulate": bool(adds), **layer})
    return cases


def judged() -> list[dict[str, Any]]:
    """Cases whose bits are compared, each on every tile: all kinds, results, additions, biases."""
    cases = []
    for name, (sizes, tail, n, k) in RAGGED.items():
        for gemm in SIDES:
            for kind in KINDS:
                for out in ("bfloat16", "float32", "float16"):
                    for accumulate in (False, True) if gemm == "wgrad" else (False,):
                        one: dict[str, Any] = {
                            "gemm": gemm,
                            "kind": kind,
                            "out": out,
                            "accumulate": accumulate,
                            "n": n,
                            "k": k,
                        }
                        one |= {
                            "shape": name,
                            "sizes": sizes,
                            "tail": tail,
                            "bias": gemm == "fprop" and out != "float32",
                        }
                        # the model's choice, and tiles that every build has
                        cases += [{**one, "tile": tile} for tile in (-1, 0, 1, 2)]
    return cases


# ---- in the process of one build


def _codes(shape: tuple[int, ...], code_format: str) -> Any:
    """Bytes of a rounded normal distribution for FP8; two random FP4 values a byte for E2M1."""
    import torch

    if code_format == "e2m1":
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 60).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn if code_format == "e4m3" else torch.float8_e5m2)


def _scales(shape: tuple[int, ...], scaling: str) -> Any:
    """Decode scales that keep sums near 1: fp32 of arbitrary bits, E8M0 or E4M3 bytes."""
    import torch

    if scaling == "mxfp8":
        return torch.randint(118, 123, shape, dtype=torch.uint8, device="cuda")
    if scaling == "nvfp4":
        return torch.randint(0x30, 0x50, shape, dtype=torch.uint8, device="cuda")
    return torch.rand(shape, device="cuda") * 0.02 + 0.005


def _operand(case: dict[str, Any], side: int) -> dict[str, Any]:
    """{"": codes or values, "_scales": ..., "_global": ...} of the left (0) or right (1) operand."""
    import torch

    from octavo_native import layouts

    name, spec = SIDES[case["gemm"]][side], KINDS[case["kind"]]
    groups, rows = len(case["sizes"]), sum(case["sizes"]) + case["tail"]
    stacked = name == "w"
    cols = case["n"] if name == "dy" else case["k"]
    if "scaling" not in spec:
        dtype = getattr(torch, spec.get("dtype", "bfloat16"))
        return {"": torch.randn((groups, case["n"], cols) if stacked else (rows, cols), device="cuda").to(dtype)}
    columnwise = case["gemm"] == "wgrad" or (case["gemm"] == "dgrad" and stacked)
    code_format = spec.get(("left_format", "right_format")[side], "e4m3")
    shape: dict[str, Any] = {
        "format": code_format,
        "scaling": spec["scaling"],
        "layout": "panels" if columnwise else "rows",
        "direction": "columnwise" if columnwise else "rowwise",
        "rows": groups * case["n"] if stacked else rows,
        "cols": cols,
        "groups": groups,
        "matrix_rows": case["n"] if stacked else 0,
        "square": stacked and spec["scaling"] in ("block", "nvfp4"),
    }
    codes, scales = layouts.codes_shape(**shape), layouts.scales_shape(**shape)
    made = {"": _codes(codes, code_format), "_scales": _scales(scales, spec["scaling"])}
    if spec["scaling"] == "nvfp4":
        made["_global"] = torch.rand(groups, device="cuda") * 0.02 + 0.005
    return made


class Call:
    """One GEMM with its operands on the device."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        import octavo_native as native
        from octavo_native.gemms import gemm_named

        torch.manual_seed(17)
        groups, rows, n, k = len(case["sizes"]), sum(case["sizes"]) + case["tail"], case["n"], case["k"]
        spec = dict(KINDS[case["kind"]])
        if spec.get("scaling") in ("block", "nvfp4") and case["gemm"] != "wgrad":
            spec["right_square"] = True
        self.gemm = gemm_named(gemm=case["gemm"], out_dtype=case["out"], accumulate=case["accumulate"], **spec)
        sides = {"cuda": True, "rows": rows, "n": n, "k": k, "groups": groups}
        stream = torch.cuda.current_stream().cuda_stream
        sizes = torch.tensor(case["sizes"], device="cuda")
        plan = torch.zeros(native.plan_words(rows, groups), dtype=torch.int64, device="cuda")
        native.plan(
            cuda=True,
            sizes=sizes.data_ptr(),
            sizes_are_64=True,
            groups=groups,
            rows=rows,
            plan=plan.data_ptr(),
            stream=stream,
        )
        shape = {"fprop": (rows, n), "dgrad": (rows, k), "wgrad": (groups, n, k)}[case["gemm"]]
        dtype = getattr(torch, case["out"])
        self.out = (
            torch.randn(shape, device="cuda").to(dtype)
            if case["accumulate"]
            else torch.empty(shape, dtype=dtype, device="cuda").fill_(torch.nan)
        )
        self.start = self.out.clone() if self.out.numel() < 1 << 26 else None
        bytes_needed = self.gemm.workspace_bytes(**sides, tile=case["tile"])
        workspace = torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
        arrays = {"plan": plan, "out": self.out, "workspace": workspace}
        for number, side in enumerate(("left", "right")):
            arrays |= {f"{side}{part}": value for part, value in _operand(case, number).items()}
        if case.get("bias"):
            arrays["bias"] = torch.randn(groups, n, device="cuda").bfloat16()
        self.held = (arrays, sizes)
        self.arguments = {name: value.data_ptr() for name, value in arrays.items()} | sides
        self.arguments |= {"tile": case["tile"], "workspace_bytes": bytes_needed, "stream": stream}

    def run(self) -> None:
        """Queue one call."""
        self.gemm.run(**self.arguments)

    def digest(self) -> list[int]:
        """Two sums over the words of the result."""
        return digest(self.out)


# ---- in the parent


def compare(builds: list[Build], case: dict[str, Any], tiles: list[int], turns: int, batch_us: float) -> dict[str, Any]:
    """One row: whether bits are equal, medians in microseconds, and each build's time over the first's."""
    digests = digests_of(builds, [{**case, "tile": tile} for tile in tiles])
    return {
        **{name: case[name] for name in ("gemm", "kind", "out", "accumulate", "shape", "groups")},
        "equal_bits": all(digest == digests[0] for digest in digests),
        **in_turns(builds, turns, batch_us),
    }


def main() -> int:
    """The command; `--help` says what it takes. 1 where bits differ."""
    parser = options_of(__doc__, list(LINEAR), batch_ms=25.0)
    parser.add_argument("--kinds", default="bf16,tensor,block", help="by commas")
    parser.add_argument("--groups", default="even", help='"even", "drawn" at random for each row, or both, by commas')
    parser.add_argument("--gemms", default="fprop,dgrad,wgrad,wgrad+f32", help="by commas; +f32: added to fp32")
    parser.add_argument(
        "--tiles", default="-1", help="tile that is timed, -1 the model's choice; or one for each build"
    )
    parser.add_argument("--no-bits", action="store_true", help="no comparison on ragged sizes")
    options = parser.parse_args()
    if options.serve:
        serve(Call)
        return 0
    if not options.builds:
        parser.error("give the folders of two builds")
    builds = [Build(folder, __file__) for folder in options.builds]
    tiles = [int(tile) for tile in options.tiles.split(",")]
    tiles = tiles * len(builds) if len(tiles) == 1 else tiles
    different, compared = [], 0
    start = time.monotonic()
    for case in [] if options.no_bits else judged():
        digests = digests_of(builds, [case] * len(builds))
        compared += isinstance(digests[0], list)
        if any(digest != digests[0] for digest in digests):
            different.append(case)
            print(f"other bits: {case}: {digests}", flush=True)
    print(f"{compared} results compared in {time.monotonic() - start:.1f} s, {len(different)} differ", flush=True)
    rows = []
    lists = [named.split(",") for named in (options.groups, options.shapes, options.kinds, options.gemms)]
    for case in timed(*lists):
        row = compare(builds, case, tiles, options.turns, 1e3 * options.batch_ms)
        rows.append(row)
        what = f"{row['gemm']}{'+' if row['accumulate'] else ''} {row['out']}"
        numbers = "  ".join(f"{us:8.1f} ({over:.4f})" for us, over in zip(row["us"], row["over_first"], strict=True))
        bits = "" if row["equal_bits"] else "   OTHER BITS"
        print(f"{row['shape']:17} {row['groups']:5} {row['kind']:7} {what:16} {numbers}{bits}", flush=True)
    return finish(options, {"compared": compared, "different": different}, rows, {"tiles": tiles})


if __name__ == "__main__":
    sys.exit(main())
