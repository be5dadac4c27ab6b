"""What the core does without, and how to get it."""

from __future__ import annotations

OF = {
    "scikit-learn": "train",
    "matplotlib": "train",
    "tqdm": "train",
    "safetensors": "train",
    "pillow": "train",
    "scipy": "plan",
    "transformers": "hf",
    "lightning": "lightning",
}


def install(package: str) -> str:
    """The command that installs a package, quoted as shells want it."""
    return f'pip install "halfback[{OF[package]}]"' if package in OF else f"pip install {package}"
