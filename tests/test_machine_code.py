"""The machine code of the kernels that wait for other GPUs, or that other GPUs wait for: loads and
fences are of the system.

On one GPU a load of too small a scope shows in no result, since all that it could miss lies in one
L2 cache. So the code itself is looked at.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from ._checkout import ROOT

SPACE = "_ZN9optimizer13communication"
# Kernel -> architectures that have code of its own.
KERNELS = {
    f"{SPACE}11wait_kernelENS0_4WaitE": ("sm_80", "sm_90"),
    f"{SPACE}12fence_kernelEv": ("sm_80", "sm_90"),
    f"{SPACE}11rows_kernelENS0_8RowsListE": ("sm_80", "sm_90"),
    **{
        f"{SPACE}15progress_kernelI{dtype}Lb{columns}EEEvNS0_17ProgressArgumentsE": ("sm_90a",)
        for dtype in ("13__nv_bfloat16", "6__half")
        for columns in (0, 1)
    },
}
ACQUIRE = re.compile(r"\bLDG?\.E\.STRONG\.SYS\b")  # behind it the L1 cache is dropped
NEAR = 400  # characters
PROXY = "FENCE.VIEW.ASYNC.G"


def findings(kernel: str, code: str) -> list[str]:
    """What is wrong with the disassembly of one kernel for one architecture."""
    found = [f"{scope} scope" for scope in ("STRONG.GPU", "STRONG.SM", "SC.GPU") if scope in code]
    if "fence_kernel" in kernel or "rows_kernel" in kernel:
        return found + ["no fence of the system"] * ("MEMBAR.SC.SYS" not in code)
    acquires = [at.start() for at in ACQUIRE.finditer(code)]
    if not any("CCTL.IVALL" in code[at : at + NEAR] for at in acquires):
        found.append("no load that acquires at the scope of the system")
    if "progress_kernel" in kernel and PROXY not in code:
        found.append("no fence between the signal and the copies of TMA")
    return found


def disassembled(library: Path) -> dict[tuple[str, str], str]:
    """(kernel, architecture) -> instructions, of the kernels of KERNELS."""
    triton = Path(find_spec("triton").origin).parent
    tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "-sass", "-fun", ",".join(KERNELS), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, architecture = {}, ""
    for part in re.split(r"^(?=arch = |\s*Function : )", done.stdout, flags=re.MULTILINE):
        head, _, rest = part.strip().partition("\n")
        if head.startswith("arch = "):
            architecture = head.removeprefix("arch = ")
        elif head.startswith("Function : "):
            code = re.sub(r"/\*.*?\*/", "", rest)  # addresses, and the bits of instructions
            found[head.removeprefix("Function : "), architecture] = " ".join(code.split())
    return found


@pytest.mark.artifacts
def test_waits_acquire_from_the_whole_system():
    for library in sorted((ROOT / "build").glob("torch*-cu*/*.abi3.so")):
        found = disassembled(library)
        wanted = {(kernel, arch) for kernel, archs in KERNELS.items() for arch in archs}
        assert found.keys() == wanted
        wrong = {key: faults for key, code in found.items() if (faults := findings(key[0], code))}
        assert not wrong, wrong


GOOD = "LDG.E.STRONG.SYS R3, desc[UR4][R4.64] ;\nCCTL.IVALL ;\nFENCE.VIEW.ASYNC.G ;\nEXIT ;"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "finding"),
    [
        ("progress_kernel", "SYS", "GPU", "STRONG.GPU scope"),
        ("progress_kernel", "SYS", "GPU", "no load that acquires"),
        ("wait_kernel", "CCTL.IVALL", "NOP", "no load that acquires"),
        ("progress_kernel", PROXY, "NOP", "no fence between"),
        ("fence_kernel", "", "", "no fence of the system"),
        ("rows_kernel", "", "", "no fence of the system"),
    ],
)
def test_each_finding_can_appear(kernel, old, new, finding):
    assert findings("wait_kernel", GOOD) == findings("progress_kernel", GOOD) == []
    for fenced in ("fence_kernel", "rows_kernel"):
        assert findings(fenced, "MEMBAR.SC.SYS ;") == []
    assert any(finding in fault for fault in findings(kernel, GOOD.replace(old, new)))
