"""Silences what megatron-core says in every run on a CPU and no user can act on.

A program imports this before anything that imports megatron-core. The library itself never does: what other
programs are told is theirs to decide.
"""

import logging
import warnings

for _message in (
    r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to",
    r"full scope is deprecated\. Use empty cuda_graph_(scope|modules)",  # its own default
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",  # its optimizers
    r"Please use DTensor instead and we are deprecating ShardedTensor",  # its checkpoints
    r"`load_state_dict` is deprecated and will be removed in future versions\. Please use `load`",
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)

# Which model class a launcher builds is not its user's choice (0.19).
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in str(record.msg))
