"""Dependencies of megatron-augtree; everything else about the package is in ``pyproject.toml``."""

from setuptools import setup

TRAIN = [
    "torch>=2.6",  # megatron-core's own lower bound; requirements/test.txt has the version that is tested
    "megatron-core>=0.16,<0.20",
    "safetensors",
    "tensorboard",
    "tqdm",
    "psutil",  # megatron-core's checkpoint writer imports it, but does not ask for it
    "matplotlib",
]

setup(
    install_requires=["numpy"],  # planning, simulating and reading group files need no more
    extras_require={
        "train": TRAIN,
        "gpu": ["transformer-engine[pytorch]"],
        # By address: the package that registries call "apex" is another project.
        "apex": ["apex @ git+https://github.com/NVIDIA/apex.git"],
        "cpp": ["pybind11"],
        # Reads pretrained weights. Beside it, without dependencies: requirements/models.txt.
        "pretrained": ["gguf"],
        "test": [*TRAIN, "pytest>=8", "hypothesis", "ruff", "allpairspy", "gguf"],
    },
)
