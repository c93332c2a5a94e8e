"""Dependencies of megatron-augtree, and its C++ core; everything else about it is in ``pyproject.toml``."""

from glob import glob

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:
    CORE = []  # pure Python computes the same, slower
else:
    CORE = [
        Pybind11Extension(
            "megatron_augtree._core",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            extra_compile_args=["-O3", "-fno-plt"],
            optional=True,  # no compiler, no core
        )
    ]

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
    ext_modules=CORE,
    install_requires=["numpy"],  # planning, simulating and reading group files need no more
    extras_require={
        "train": TRAIN,
        "cli": ["rich", "matplotlib"],  # tables on a terminal, pictures; the command line works without
        "gpu": ["transformer-engine[pytorch]"],
        # By address: the package that registries call "apex" is another project.
        "apex": ["apex @ git+https://github.com/NVIDIA/apex.git"],
        "cpp": ["pybind11"],
        # Reads pretrained weights. Beside it, without dependencies: requirements/models.txt.
        "pretrained": ["gguf"],
        "test": [*TRAIN, "pytest>=8", "hypothesis", "ruff", "allpairspy", "gguf", "rich", "pybind11"],
    },
)
