"""`octavo why` of chips that are elsewhere, and of products that a chip emulates."""

from __future__ import annotations

import re
from typing import Any

import pytest


def test_why_supposes_a_chip_that_is_not_here(run: Any, use: Any, fakes: Any) -> None:
    """Cards and the backends' shape rules alone: nothing is bound, so a backend that needs the chip answers, too."""

    class OfHopper(fakes.Backend):
        def refuses(self, request: Any) -> str | None:
            return "this machine has no such device"

        def refuses_everywhere(self, request: Any) -> str | None:
            return f"K must be a multiple of 16, it is {request.k}" if (request.k or 16) % 16 else None

    row = fakes.row(device="cuda", min_arch=(9, 0))
    use(fakes.registry(fakes.plugin("hopper", rows=[row], backend=OfHopper(), priority=5), fakes.plugin("a")))
    asked = ["why", "fprop", "--recipe", "mxfp8", "--framework", "torch"]
    for chip, code, words in (
        ("h100", 0, r"hopper +chosen .*the only one that serves this"),
        ("H200", 0, r"hopper +chosen"),
        ("sm_90", 0, r"hopper +chosen"),
        ("9.0", 0, r"declare for a device of compute capability 9\.0; no such device was looked at"),
        ("a100", 1, r"hopper +refused .*needs sm_90 or newer, this device is sm_80"),
        ("cpu", 0, r"a +chosen"),
    ):
        ran = run(*asked, "--hypothetical", chip)
        assert ran.code == code, ran.out
        assert re.search(words, ran.out), ran.out
    uneven = run(*asked, "--hypothetical", "h100", "--shape", "4,7170,64,64")
    assert uneven.code == 1
    assert "K must be a multiple of 16, it is 7170" in uneven.out
    assert "K = 7184 (now 7170), the next multiple of 16: hopper" in uneven.out
    layer = run("why", "layer", *asked[2:], "--hypothetical", "h100", "--json").json
    assert layer["served"] is True
    assert {one["backend"] for one in layer["operations"]} == {"hopper"}
    wrong = run(*asked, "--hypothetical", "h10")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean h100?" in wrong.err
    assert "got '4090'; did you mean rtx4090?" in run(*asked, "--hypothetical", "4090").err
    assert "did you mean" not in run(*asked, "--hypothetical", "mi300").err  # of another vendor, and no b300
    unknown = run(*asked, "--device", "gpu")
    assert (unknown.code, unknown.out) == (2, "")
    assert "--device is 'gpu'; give 'cpu' or 'cuda'" in unknown.err
    assert "leave out --device" in run(*asked, "--hypothetical", "h100", "--device", "cuda").err


@pytest.mark.parametrize(
    ("chip", "capability"),
    [("V100", "70"), ("a10", "86"), ("RTX 4090", "89"), ("gh200", "90"), ("b200", "100"), ("gb300", "103")],
)
def test_a_chip_has_its_own_capability(chip: str, capability: str, run: Any, use: Any, fakes: Any) -> None:
    """A table with a typing error would promise kernels to a chip that cannot run them."""
    use(fakes.registry(fakes.plugin("newer", rows=[fakes.row(device="cuda", min_arch=(12, 0))])))
    ran = run("why", "fprop", "--recipe", "mxfp8", "--framework", "torch", "--hypothetical", chip)
    assert f"needs sm_120 or newer, this device is sm_{capability}" in ran.out


def test_why_says_that_products_are_emulated(run: Any, use: Any, fakes: Any) -> None:
    """command.md: a chip without tensor cores for a recipe is said to emulate it, as the card of who serves has it."""
    how = "bf16 products of copies"
    rows = [fakes.row(device="cuda", emulated=how), fakes.row(device="cuda", recipes={"block"})]
    use(fakes.registry(fakes.plugin("hopper", rows=[*rows, fakes.row(emulated="fp32 products")])))
    sentence = (
        f"On H100, hopper emulates the products in mxfp8, which usually takes longer than the recipe bf16: {how}."
    )
    for op in ("fprop", "layer", "mlp"):
        asked = ["why", op, "--recipe", "mxfp8", "--framework", "torch"]
        ran = run(*asked, "--hypothetical", "h100")
        assert ran.out.splitlines().count(sentence) == 1
        assert f"the only one that serves this; emulated: {how}" in ran.out
        here = run(*asked, "--device", "cuda", "--arch", "9.0")
        assert sentence.replace("H100", "this device") in here.out.splitlines()
        for place in (["--hypothetical", "h100"], ["--device", "cuda", "--arch", "9.0"]):
            assert run(*asked, *place, "--json").json["emulated"] == [
                {"backend": "hopper", "recipe": "mxfp8", "how": how}
            ]
        assert run(*asked, "--hypothetical", "cpu", "--json").json["emulated"] == []
    block = run("why", "layer", "--recipe", "fp8-block", "--framework", "torch", "--hypothetical", "h100")
    assert block.code == 0
    assert "emulate" not in block.out
    quantizer = run("why", "quantize", "--recipe", "mxfp8", "--framework", "torch", "--hypothetical", "h100")
    assert "emulate" not in quantizer.out
