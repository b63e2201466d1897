"""What a rank does in the tests of this plugin; run by `support.pool` in processes of their own."""

import torch

import steelyard


def outputs(folder, inputs, tp):
    """Load a checkpoint over the ranks of this job, compute a batch, and return both outputs as lists.

    Args:
        folder: The checkpoint.
        inputs: Arguments of the module, nested lists or None.
        tp: Tensor-parallel size.
    """
    model = steelyard.load(folder, device="cpu", dtype="float32", tp=tp)
    with torch.inference_mode():
        output = model.module(*(None if one is None else torch.tensor(one) for one in inputs))
    pooled = None if output.pooler_output is None else output.pooler_output.tolist()
    return output.last_hidden_state.tolist(), pooled
